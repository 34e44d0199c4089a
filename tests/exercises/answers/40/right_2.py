"""Exercise 40: name the cause in four traces."""

from statistics import median

LATE_MS = 5
SHARE = 1 / 5


BY_EYE = ("computation", 0, "aten::median")


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
