"""Find the rank that slows the others down, from the traces alone.

Step times are too noisy for this on a busy machine: the operating system preempts a rank for longer
than the delay we are looking for. Preemption only adds time, and it hits a different operator in
each step. A slow rank is slow at the same operator in every step. So we split each step into
operators and the gaps between them, without the time spent waiting for other ranks. For each
operator or gap we compare the shortest time on this rank with the median on the other ranks. The
sum of the positive differences is the delay of the rank. A false positive would need a disturbance
of the same operator in all `STEPS_NEEDED` steps.

Medians and quantiles of steps, pairs of steps or phases are much less reliable, because they add up
the disturbances of all operators. This method misses a rank that is slow only in some steps, or
slow at a different operator each time.
Source: Chen and Revels, 2016, https://arxiv.org/abs/1608.04295 (disturbances only add to the time
of a program, so the shortest time is the most reliable one)
"""

import math
from statistics import median

from accel_demo.lab.timeline.spans import length, span_of, subtract

STEPS_NEEDED = 32
LEAST_MS = 5.0
LEAST_SHARE = 0.02  # of a step; smaller differences also occur between equal ranks

# ("operator" or the "gap" before it, operator name, index among equal names): ms in each step
OperatorTimes = dict[tuple[str, str, int], list[float]]


def slow_rank(times_by_rank: list[OperatorTimes]) -> tuple[int | None, list[float]]:
    """Return the slowest rank and the delay of each rank per step in milliseconds.

    The rank is None if no delay reaches both `LEAST_MS` and `LEAST_SHARE` of the rank's undisturbed
    step time.
    """
    delays = [delay_of(rank, times_by_rank) for rank in range(len(times_by_rank))]
    slowest = max(range(len(delays)), key=delays.__getitem__)
    undisturbed_ms = math.fsum(min(times) for times in times_by_rank[slowest].values())
    is_slow = delays[slowest] >= max(LEAST_MS, LEAST_SHARE * undisturbed_ms)
    return slowest if is_slow else None, delays


def delay_of(rank: int, times_by_rank: list[OperatorTimes]) -> float:
    """Return the minimum delay of this rank per step in milliseconds, compared with the others."""
    others = [times for other, times in enumerate(times_by_rank) if other != rank]
    steps = max(map(len, times_by_rank[rank].values()))
    delay = 0.0
    for operator, times in times_by_rank[rank].items():
        if others and len(times) == steps:  # skip operators that are not in every step
            usual = median(time for other in others for time in other.get(operator, [0.0]))
            delay += max(0.0, min(times) - usual)
    return delay


def operator_times(trace) -> OperatorTimes:
    """Return the times of the operators and gaps in a `phases.RankTrace`, excluding waits."""
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
    """Return how many milliseconds after the first rank each rank reaches a collective.

    A step has several collectives, one per bucket. The result is the median over the steps of the
    largest delay in each step.
    """
    late: list[list[float]] = [[] for _ in traces]
    for step in traces[0].steps:
        arrivals = [trace.arrivals_in(step) for trace in traces]
        collectives = list(zip(*arrivals, strict=False))
        for rank, times in enumerate(late):
            times.append(max((all[rank] - min(all) for all in collectives), default=0.0))
    return [median(times) for times in late]
