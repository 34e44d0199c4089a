"""Exercise 14: find the straggler in four traces.

exercises/14_traces/ contains four traces in the format of `accel-demo timeline`, with only the
phases and the all-reduces: a.json to d.json. Load one into https://ui.perfetto.dev to look at it.
In each trace, several ranks train together for some steps. A step has two buckets, so two
all-reduces.

`straggler(trace)` should return the rank that slows the others down: in most of the steps, it
starts the all-reduces at least 5 ms later than the first rank. If there is no such rank, it should
return None. A rank with a single slow step, or with small variations, is not a straggler.

`spans(trace, name)` returns the events with this name, by rank, in the order of the steps, as
`(start, end)` in ms on the same clock. The names are "step 5" and so on, "data wait", "forward",
"backward", "optimizer" and "gloo:all_reduce". An all-reduce starts on a rank when this rank reaches
it, and ends when all ranks have reached it. The function below returns the rank that spends most
time in all-reduces. What is that rank really doing?

accel-demo check 14
"""


def straggler(trace: dict) -> int | None:
    waited = {
        rank: sum(end - start for start, end in all_reduces)
        for rank, all_reduces in spans(trace, "gloo:all_reduce").items()
    }
    return max(waited, key=waited.get)


def spans(trace: dict, name: str) -> dict[int, list[tuple[float, float]]]:
    ranks = {}  # process number in the trace → rank
    for event in trace["traceEvents"]:
        if event["name"] == "process_name" and event["args"]["name"].startswith("rank "):
            ranks[event["pid"]] = int(event["args"]["name"].split()[1].strip(","))
    by_rank = {rank: [] for rank in sorted(ranks.values())}
    for event in sorted(trace["traceEvents"], key=lambda event: event.get("ts", 0)):
        if event["name"] == name and event["ph"] == "X":
            start, end = event["ts"] / 1000, (event["ts"] + event["dur"]) / 1000
            by_rank[ranks[event["pid"]]].append((start, end))
    return by_rank
