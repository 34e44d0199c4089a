"""Exercise 40: name the cause in four traces."""

import re
from statistics import median

BY_EYE = ("computation", 0, "aten::median")


def cause(trace: dict) -> tuple[str, int | None]:
    steps = whole_steps(trace)
    waits = {rank: lengths(found) for rank, found in spans(trace, "data wait").items()}
    # The second all-reduce of a step starts when this rank has all gradients of the step.
    last = {rank: found[1::2] for rank, found in spans(trace, "gloo:all_reduce").items()}
    ready = {rank: [start for start, _ in found] for rank, found in last.items()}

    for rank in ready:
        others = [other for other in ready if other != rank]
        if not others or not in_most(LATE <= lag for lag in lags(ready, rank, others)):
            continue
        total = median(lags(ready, rank, others))
        from_data = median(
            own - max(rest)
            for own, *rest in zip(waits[rank], *(waits[other] for other in others), strict=True)
        )
        return ("data" if from_data > total / 2 else "computation"), rank

    exposed = {rank: lengths(found) for rank, found in last.items()}
    for name, times in (("data", waits), ("communication", exposed)):
        if all(
            in_most(
                time >= SHARE * step for time, step in zip(times[rank], steps[rank], strict=True)
            )
            for rank in steps
        ):
            return name, None
    return "nothing", None


LATE = 5.0  # ms
SHARE = 0.2  # of a step


def in_most(verdicts) -> bool:
    verdicts = list(verdicts)
    return 2 * sum(verdicts) > len(verdicts)


def lags(ready, rank, others) -> list[float]:
    """How long after the slowest of the others this rank was ready, in each step."""
    rows = zip(ready[rank], *(ready[other] for other in others), strict=True)
    return [own - max(rest) for own, *rest in rows]


def lengths(found) -> list[float]:
    return [end - start for start, end in found]


def whole_steps(trace: dict) -> dict[int, list[float]]:
    names = {event["name"] for event in trace["traceEvents"]}
    in_order = sorted(
        (name for name in names if re.fullmatch(r"step \d+", name)),
        key=lambda name: int(name.removeprefix("step ")),
    )
    steps: dict[int, list[float]] = {}
    for name in in_order:
        for rank, found in spans(trace, name).items():
            steps.setdefault(rank, []).extend(lengths(found))
    return steps


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
