"""Exercise 40: find the cause in five traces.

exercises/40_traces/ contains five traces. In each of them, several ranks train together.

First, e.json.gz: torch.profiler recorded it on two ranks of a script that trains with DDP, and
40_compare.py merged it. Open it in https://ui.perfetto.dev, find out by eye what makes its steps
long, and change `BY_EYE` below. It has the cause and the rank, as explained below, and the name of
the operator that takes the time (such as "aten::relu"), or "" if the cause isn't "computation".

Then a.json to d.json. They have the format of `accel-demo timeline`, but contain only the phases
and the all-reduces. Each step has two buckets, so there are two all-reduces on each rank.

`cause(trace)` should return a pair that names what makes the steps long. Return the first of these
that applies:

("data", 2)              rank 2 is slow, and it waits at least 5 ms longer for its data than every
                         other rank
("computation", 2)       rank 2 is slow because its forward, backward or optimizer takes longer
("data", None)           no rank is slow, but every rank spends a fifth of each step waiting for
                         data
("communication", None)  no rank is slow, but every rank spends a fifth of each step doing nothing
                         but waiting for all-reduces
("nothing", None)        none of these

A rank is *slow* if most steps would be at least 5 ms shorter if this one rank were as fast as the
others. "A fifth" means at least a fifth, in most steps. You won't meet a case close to a limit: a
slow rank costs at least 10 ms, and the shares are either below 0.15 or above 0.25. In every trace,
a few single steps may be much slower than the others.

`spans(trace, name)` returns the events with this name: a list of `(start, end)` for each rank, in
step order, in ms on a common clock. The names are "data wait", "forward", "backward", "optimizer",
"gloo:all_reduce", and "step 5", "step 6" and so on, up to the last step of the trace. An all-reduce
starts when this rank calls it. The event "backward" also contains the wait for the all-reduces.

The function below returns the rank that spends the most time in all-reduces.

accel-demo check 40
"""

BY_EYE = ("nothing", None, "")  # e.json.gz


def cause(trace: dict) -> tuple[str, int | None]:
    waited = {
        rank: sum(end - start for start, end in all_reduces)
        for rank, all_reduces in spans(trace, "gloo:all_reduce").items()
    }
    return "computation", max(waited, key=waited.get)


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
