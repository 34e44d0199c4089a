"""A model answer to exercise 40."""

from statistics import median


def straggler(trace: dict) -> int | None:
    all_reduces = spans(trace, "gloo:all_reduce")
    arrivals = zip(*all_reduces.values(), strict=True)  # one item per all-reduce
    late = {rank: [] for rank in all_reduces}
    for ranks in arrivals:
        first = min(start for start, _ in ranks)
        for rank, (start, _) in zip(all_reduces, ranks, strict=True):
            late[rank].append(start - first)
    usual = {rank: median(times) for rank, times in late.items()}  # without single slow steps
    slowest = max(usual, key=usual.get)
    return slowest if usual[slowest] >= 5 else None


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
