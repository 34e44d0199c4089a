"""Our answer to exercise 40."""

from statistics import median

BY_EYE = ("computation", 0, "aten::median")


def cause(trace: dict) -> tuple[str, int | None]:
    last = {
        rank: all_reduces[1::2] for rank, all_reduces in spans(trace, "gloo:all_reduce").items()
    }
    data = {rank: lengths(waits) for rank, waits in spans(trace, "data wait").items()}
    for rank in last:
        others = [other for other in last if other != rank]
        late, waits_longer = [], []
        for step, (start, _) in enumerate(last[rank]):
            late.append(start - max(last[other][step][0] for other in others))
            waits_longer.append(data[rank][step] - max(data[other][step] for other in others))
        if median(late) >= 5:
            return "data" if median(waits_longer) >= 5 else "computation", rank

    # A step ends with its optimizer, and begins with its data wait.
    begins = {
        rank: [start for start, _ in waits] for rank, waits in spans(trace, "data wait").items()
    }
    ends = {rank: [end for _, end in phases] for rank, phases in spans(trace, "optimizer").items()}
    steps = {rank: lengths(zip(begins[rank], ends[rank], strict=True)) for rank in last}
    exposed = {rank: lengths(all_reduces) for rank, all_reduces in last.items()}
    for name, times in (("data", data), ("communication", exposed)):
        shares = [
            median(time / step for time, step in zip(times[rank], steps[rank], strict=True))
            for rank in last
        ]
        if min(shares) >= 0.2:
            return name, None
    return "nothing", None


def lengths(intervals) -> list[float]:
    return [end - start for start, end in intervals]


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
