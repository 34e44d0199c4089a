"""Exercise 14: find the straggler in four traces.

exercises/14_traces/ has four traces as `accel-demo timeline` writes them, with the phases and the
all-reduces alone: a.json to d.json. Load one into https://ui.perfetto.dev to look at it. In each,
several ranks train together for some steps; a step has two buckets, so two all-reduces.

`straggler(trace)` should return the rank that holds the others up: the one that comes to the
all-reduces at least 5 ms later than the first to come, in most of the steps. Where there is no such
rank it should return None. One slow step is no straggler, and neither is a little unrest.

`spans(trace, name)` gives the events of that name, by rank, step after step: `(start, end)` in ms
on one clock. The names are "step 5" and so on, "data wait", "forward", "backward", "optimizer" and
"gloo:all_reduce". An all-reduce starts on a rank when the rank has come to it, and ends when all
have. The function below names the rank that spends most time there. What does that rank really do?

accel-demo check 14
"""


def straggler(trace: dict) -> int | None:
    waited = {
        rank: sum(end - start for start, end in all_reduces)
        for rank, all_reduces in spans(trace, "gloo:all_reduce").items()
    }
    return max(waited, key=waited.get)


def spans(trace: dict, name: str) -> dict[int, list[tuple[float, float]]]:
    ranks = {}  # the number of a process in the trace → its rank
    for event in trace["traceEvents"]:
        if event["name"] == "process_name" and event["args"]["name"].startswith("rank "):
            ranks[event["pid"]] = int(event["args"]["name"].split()[1].strip(","))
    found = {rank: [] for rank in sorted(ranks.values())}
    for event in sorted(trace["traceEvents"], key=lambda event: event.get("ts", 0)):
        if event["name"] == name and event["ph"] == "X":
            start, end = event["ts"] / 1000, (event["ts"] + event["dur"]) / 1000
            found[ranks[event["pid"]]].append((start, end))
    return found
