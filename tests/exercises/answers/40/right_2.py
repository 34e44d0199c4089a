"""Exercise 40: name the cause in four traces.

exercises/40_traces/ contains four traces, a.json to d.json, in the format of `accel-demo timeline`.
They contain only the phases and the all-reduces. To view a trace, open it in
https://ui.perfetto.dev. In each trace, several ranks train together for some steps. Each step has
two buckets, and therefore two all-reduces on each rank.

`cause(trace)` should return a pair that says what makes the steps long: the first that applies of

("data", 2)              rank 2 is slow, because it waits for data longer than the other ranks do
("computation", 2)       rank 2 is slow, because its forward, backward or optimizer takes longer
("data", None)           no rank is slow, but every rank waits for data in a fifth of each step
("communication", None)  no rank is slow, but every rank only waits for all-reduces, and computes
                         nothing, in a fifth of each step
("nothing", None)        none of these

A rank is *slow* if it starts the all-reduces at least 5 ms later than every other rank, in most
steps. "A fifth" means: at least a fifth, in most steps. No case is close to a limit: a slow rank is
at least 10 ms later, and the shares are either below 0.15 or above 0.25. In every trace, a few
single steps may be much slower than the others.

`spans(trace, name)` returns the events with this name: a list of `(start, end)` for each rank, in
step order, in ms on a common clock. The names are "step 5" and so on, "data wait", "forward",
"backward", "optimizer" and "gloo:all_reduce". On each rank, an all-reduce starts when this rank
calls it, and ends after all ranks have called it. The last one of a step starts when the rank has
computed all gradients. The event "backward" also contains the wait after that.

The function below returns the rank that spends the most time in all-reduces.

accel-demo check 40
"""

from statistics import median

LATE_MS = 5
SHARE = 1 / 5


def cause(trace: dict) -> tuple[str, int | None]:
    data_ms = {
        rank: [end - start for start, end in waits]
        for rank, waits in spans(trace, "data wait").items()
    }
    computed_at, exposed_ms = {}, {}
    for rank, all_reduces in spans(trace, "gloo:all_reduce").items():
        pairs = list(zip(all_reduces[::2], all_reduces[1::2], strict=True))
        computed_at[rank] = [last[0] for _, last in pairs]
        exposed_ms[rank] = [max(first[1], last[1]) - last[0] for first, last in pairs]

    for rank in computed_at:
        if _typical_lead(computed_at, rank) >= LATE_MS:
            waits_longer = _typical_lead(data_ms, rank) >= LATE_MS
            return ("data" if waits_longer else "computation"), rank

    step_ms = _step_lengths(trace)
    for name, lost_ms in (("data", data_ms), ("communication", exposed_ms)):
        if all(_typical_share(lost_ms[rank], step_ms[rank]) >= SHARE for rank in step_ms):
            return name, None
    return "nothing", None


def _typical_lead(values: dict[int, list[float]], rank: int) -> float:
    """Return by how much the rank's value is above the highest of the others, as a median."""
    others = [values[other] for other in values if other != rank]
    return median(own - max(rest) for own, *rest in zip(values[rank], *others, strict=True))


def _typical_share(parts: list[float], wholes: list[float]) -> float:
    return median(part / whole for part, whole in zip(parts, wholes, strict=True))


def _step_lengths(trace: dict) -> dict[int, list[float]]:
    names = {event["name"] for event in trace["traceEvents"] if event["name"].startswith("step ")}
    lengths = {}
    for name in sorted(names, key=lambda name: int(name.split()[1])):
        for rank, steps in spans(trace, name).items():
            lengths.setdefault(rank, []).extend(end - start for start, end in steps)
    return lengths


def spans(trace: dict, name: str) -> dict[int, list[tuple[float, float]]]:
    ranks = {}  # {process id in the trace: rank}
    for event in trace["traceEvents"]:
        if event["name"] == "process_name" and event["args"]["name"].startswith("rank "):
            ranks[event["pid"]] = int(event["args"]["name"].split()[1].strip(","))
    by_rank = {rank: [] for rank in sorted(ranks.values())}
    for event in sorted(trace["traceEvents"], key=lambda event: event.get("ts", 0)):
        if event["name"] == name and event["ph"] == "X":
            start, end = event["ts"] / 1000, (event["ts"] + event["dur"]) / 1000
            by_rank[ranks[event["pid"]]].append((start, end))
    return by_rank
