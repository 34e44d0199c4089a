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

Waiting for data is different: with several workers, a slow loader keeps the script waiting only in
some steps. So for this phase, we compare the mean over the steps, without the longest tenth.
Source: Chen and Revels, 2016, https://arxiv.org/abs/1608.04295 (disturbances only add to the time
of a program, so the shortest time is the most reliable one)
"""

import math
from statistics import fmean, median

from accel_demo.lab.timeline.spans import length, span_of

STEPS_NEEDED = 32
LEAST_MS = 5.0
LEAST_SHARE = 0.02  # of the step time; smaller differences also occur between equally fast ranks
CLEARLY_LONGER = 1.5  # times as long as on the other ranks: a wait for data

# Maps (phase, kind, operator name, index) to the milliseconds in each step. The kind is "operator",
# or "gap" for the time before the operator. The index numbers a step's operators of the same name.
# For the phase "data wait", there is only one entry.
OperatorTimes = dict[tuple[str, str, str, int], list[float]]
DATA = ("data wait", "all of it", "", 0)


def slow_rank(times_by_rank: list[OperatorTimes]) -> tuple[int | None, list[dict[str, float]]]:
    """Return the slow rank, and how many milliseconds each rank is delayed per step, by phase.

    The slow rank is None if the largest delay is below `LEAST_MS`, or below `LEAST_SHARE` of the
    undisturbed step time of the rank with that delay.
    """
    delays = [delay_of(rank, times_by_rank) for rank in range(len(times_by_rank))]
    totals = [math.fsum(delay.values()) for delay in delays]
    slowest = max(range(len(delays)), key=totals.__getitem__)
    undisturbed_ms = math.fsum(min(times) for times in times_by_rank[slowest].values())
    is_slow = totals[slowest] >= max(LEAST_MS, LEAST_SHARE * undisturbed_ms)
    return slowest if is_slow else None, delays


def delay_of(rank: int, times_by_rank: list[OperatorTimes]) -> dict[str, float]:
    """Return how many milliseconds slower this rank is in each step than the others, by phase."""
    others = [times for other, times in enumerate(times_by_rank) if other != rank]
    steps = max(map(len, times_by_rank[rank].values()))
    delay: dict[str, float] = {}
    for operator, times in times_by_rank[rank].items():
        if operator == DATA:
            usual = max((usual_wait(other.get(DATA, [0.0])) for other in others), default=math.inf)
            own = usual_wait(times)
            own = own if own > CLEARLY_LONGER * usual else 0.0
        elif others and len(times) == steps:  # skip operators that are not in every step
            usual = median(
                time for other in others for time in in_all_steps(other, operator, steps)
            )
            own = min(times)
        else:
            continue
        delay[operator[0]] = delay.get(operator[0], 0.0) + max(0.0, own - usual)
    return delay


def in_all_steps(times: OperatorTimes, operator: tuple, steps: int) -> list[float]:
    """Return the times of an operator or gap, with 0.0 for the steps that do not have it."""
    known = times.get(operator, [])
    return known + [0.0] * (steps - len(known))


def usual_wait(times: list[float]) -> float:
    """Return the mean without the longest tenth."""
    return fmean(sorted(times)[: max(1, len(times) * 9 // 10)])


def operator_times(trace) -> OperatorTimes:
    """Return how long each operator and gap in a `phases.RankTrace` takes, excluding waits.

    A gap that belongs to several phases has an entry for each of them.
    """
    times: OperatorTimes = {}
    for event in trace.steps.values():
        start, end = span_of(event)
        phases = trace.phases_in([(start, end)])
        times.setdefault(DATA, []).append(length(phases["data wait"]))
        pieces = sorted(
            (*span, phase)
            for phase, spans in phases.items()
            if not phase.endswith(" wait")
            for span in spans
        )
        last_end, first, indices = start, 0, {}
        operators = [each for each in trace.operators if start <= each["ts"] < end]
        for name, begin, stop in [(o["name"], *span_of(o)) for o in operators] + [("", end, end)]:
            index = indices[name] = indices.get(name, -1) + 1
            begin, stop = (min(end, max(last_end, time)) for time in (begin, stop))
            for kind, span in (("gap", (last_end, begin)), ("operator", (begin, stop))):
                while first < len(pieces) and pieces[first][1] <= span[0]:
                    first += 1
                found: dict[str, float] = {}
                for piece_start, piece_end, phase in pieces[first:]:
                    if piece_start >= span[1]:
                        break
                    part = min(span[1], piece_end) - max(span[0], piece_start)
                    found[phase] = found.get(phase, 0.0) + part
                for phase, part in found.items():
                    times.setdefault((phase, kind, name, index), []).append(part)
            last_end = stop
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
