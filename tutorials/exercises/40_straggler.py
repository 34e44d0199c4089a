"""Exercise 40: find the straggler in four traces.

exercises/40_traces/ contains four traces, a.json to d.json, in the format of `accel-demo timeline`.
They contain only the phases and the all-reduces. To view a trace, open it in
https://ui.perfetto.dev. In each trace, several ranks train together for some steps. Each step has
two buckets, and therefore two all-reduces.

`straggler(trace)` should return the rank that slows the others down. In most steps, this rank
starts the all-reduces at least 5 ms later than the first rank. If there is no such rank, the
function should return None. A rank with a single slow step or small variations is not a straggler.

`spans(trace, name)` returns the events with this name: a list of `(start, end)` for each rank, in
step order, in ms on a common clock. The names are "step 5" and so on, "data wait", "forward",
"backward", "optimizer" and "gloo:all_reduce". On each rank, an all-reduce starts when this rank
calls it, and ends after all ranks have called it. The function below returns the rank that spends
the most time in all-reduces. What is that rank really doing?

accel-demo check 40
"""


def straggler(trace: dict) -> int | None:
    waited = {
        rank: sum(end - start for start, end in all_reduces)
        for rank, all_reduces in spans(trace, "gloo:all_reduce").items()
    }
    return max(waited, key=waited.get)


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
