"""Find the rank that slows the others down, using only the traces.

On a busy machine, step times are too noisy for this, because the operating system can preempt a
rank for longer than the delay that we are looking for. But preemption only adds time, and it
interrupts a different operator in each step, while a slow rank is slow at the same operator in
every step. So we split each step into operators and the gaps between them, and exclude the time
spent waiting for other ranks. For each operator or gap, we compare the shortest time on one rank
with the median time on the other ranks. The sum of the positive differences is the delay of that
rank. A false positive would need an interruption of the same operator in all `STEPS_NEEDED` steps.

A median or quantile of step times or phase times is much less reliable, because each of these
times includes the interruptions of many operators. Our method misses a rank that is slow only in
some steps, or slow at a different operator in each step.
Source: Chen and Revels, 2016, https://arxiv.org/abs/1608.04295 (disturbances only add to the time
of a program, so the shortest time is the most reliable one)
"""

import math
from statistics import median

from accel_demo.lab.timeline.spans import length, span_of, subtract

STEPS_NEEDED = 32
LEAST_MS = 5.0
LEAST_SHARE = 0.02  # of the step time; smaller differences also occur between equally fast ranks

# Maps (kind, operator name, index) to the milliseconds in each step. The kind is "operator", or
# "gap" for the time before the operator. The index numbers a step's operators of the same name.
OperatorTimes = dict[tuple[str, str, int], list[float]]


def slow_rank(times_by_rank: list[OperatorTimes]) -> tuple[int | None, list[float]]:
    """Return the slow rank, and how many milliseconds each rank is delayed per step.

    The slow rank is None if the largest delay is below `LEAST_MS`, or below `LEAST_SHARE` of the
    undisturbed step time of the rank with that delay.
    """
    delays = [delay_of(rank, times_by_rank) for rank in range(len(times_by_rank))]
    slowest = max(range(len(delays)), key=delays.__getitem__)
    undisturbed_ms = math.fsum(min(times) for times in times_by_rank[slowest].values())
    is_slow = delays[slowest] >= max(LEAST_MS, LEAST_SHARE * undisturbed_ms)
    return slowest if is_slow else None, delays


def delay_of(rank: int, times_by_rank: list[OperatorTimes]) -> float:
    """Return how many milliseconds slower than the other ranks this rank is in each step."""
    others = [times for other, times in enumerate(times_by_rank) if other != rank]
    steps = max(map(len, times_by_rank[rank].values()))
    delay = 0.0
    for operator, times in times_by_rank[rank].items():
        if others and len(times) == steps:  # skip operators that are not in every step
            usual = median(time for other in others for time in other.get(operator, [0.0]))
            delay += max(0.0, min(times) - usual)
    return delay


def operator_times(trace) -> OperatorTimes:
    """Return how long each operator and gap in a `phases.RankTrace` takes, excluding waits."""
    times: OperatorTimes = {}
    for event in trace.steps.values():
        start, end = span_of(event)
        waits = trace.phases_in([(start, end)])["all-reduce"]
        last_end, indices = start, {}
        for operator in trace.operators:
            if not start <= operator["ts"] < end:
                continue
            name = operator["name"]
            index = indices[name] = indices.get(name, -1) + 1
            begin, stop = (min(end, max(last_end, time)) for time in span_of(operator))
            for kind, span in (("gap", (last_end, begin)), ("operator", (begin, stop))):
                times.setdefault((kind, name, index), []).append(length(subtract([span], waits)))
            last_end = stop
        last_gap = times.setdefault(("gap", "the end of the step", 0), [])
        last_gap.append(length(subtract([(last_end, end)], waits)))
    return times


def lateness(traces: list) -> list[float]:
    """Return how many milliseconds later than the first rank each rank starts a collective.

    A step can have several collectives. For each rank, we take the largest delay in each step, and
    return the median over the steps.
    """
    late: list[list[float]] = [[] for _ in traces]
    for step in traces[0].steps:
        arrivals = [trace.arrivals_in(step) for trace in traces]
        collectives = list(zip(*arrivals, strict=False))
        for rank, times in enumerate(late):
            times.append(max((all[rank] - min(all) for all in collectives), default=0.0))
    return [median(times) for times in late]
