# wrong: spends a long time in all-reduce, but what is it doing there?

from statistics import median


def cause(trace: dict) -> tuple[str, int | None]:
    all_reduces, data = spans(trace, "gloo:all_reduce"), spans(trace, "data wait")
    waited = {rank: lengths(times[1::2]) for rank, times in all_reduces.items()}
    for rank, own in waited.items():
        others = [times for other, times in waited.items() if other != rank]
        if median(time - min(rest) for time, *rest in zip(own, *others, strict=True)) >= 10:
            return "data" if median(lengths(data[rank])) >= 10 else "computation", rank
    if min(median(lengths(times)) for times in data.values()) >= 20:
        return "data", None
    if min(median(times) for times in waited.values()) >= 20:
        return "communication", None
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
