"""Which rank holds the others up, told from the trace alone.

How long a rank computes in a step says little on a busy machine: the system gives a core to another
program now and then, and on a laptop that takes longer than what one looks for. But it can only
make a step longer, and it strikes at another place each time; a slow rank is slow in every step, at
the same place. So a step is cut into pieces, the operators and the gaps between them, without the
time in which the rank waits for others. Of each piece the shortest time of all steps counts. Their
sum is the step of this rank when nothing disturbs it, and these sums are compared.

Of the rules that were tried on recorded runs (medians and low quantiles of whole steps, of pairs of
steps, of phases, of pieces) this one told runs with and without a delay apart most clearly. What it
cannot see is a rank that is held up in some steps only, or at another place each time.
Source: Chen and Revels, 2016, https://arxiv.org/abs/1608.04295 (what delays a program only adds to
its time, so the shortest one is the best estimate)
"""

import math
from statistics import median

from accel_demo.lab.timeline_spans import length, span_of, subtract

STEPS_NEEDED = 32  # in fewer, a busy machine disturbs some pieces in all of them
LEAST_MS = 10.0
LEAST_SHARE = 0.02  # of a step: two equal ranks differ by some of its length

# ("operator" or the "gap" before it, its name, which of that name): the ms, step by step
Pieces = dict[tuple[str, str, int], list[float]]


def slow_rank(pieces: list[Pieces]) -> tuple[int | None, list[float]]:
    """The rank that is slow, or None; and by how many ms each is slower than the others.

    `pieces` are those of each rank. Where several are slow, it is the slowest. Slow is a rank whose
    undisturbed step takes `LEAST_MS` longer than the median of the others', and `LEAST_SHARE`.
    """
    undisturbed = [undisturbed_ms(own) for own in pieces]
    slower = [0.0] * len(pieces)
    for rank, own_ms in enumerate(undisturbed):
        others = undisturbed[:rank] + undisturbed[rank + 1 :]
        if others:
            slower[rank] = own_ms - median(others)
    slowest = max(range(len(pieces)), key=slower.__getitem__)
    is_slow = slower[slowest] >= max(LEAST_MS, LEAST_SHARE * min(undisturbed))
    return slowest if is_slow else None, slower


def undisturbed_ms(pieces: Pieces) -> float:
    """How long a step takes in which nothing disturbs the rank. What is in each step counts."""
    steps = max(map(len, pieces.values()), default=0)
    return math.fsum(min(times) for times in pieces.values() if len(times) == steps)


def pieces_of(timeline) -> Pieces:
    """The pieces of a rank's steps, from its `timeline_phases.Timeline`."""
    pieces: Pieces = {}
    for event in timeline.steps.values():
        start, end = span_of(event)
        waits = timeline.phases_in([(start, end)])["all-reduce"]
        inside = [operator for operator in timeline.operators if start <= operator["ts"] < end]
        last, seen = start, {}
        for operator in inside:
            name = operator["name"]
            number = seen[name] = seen.get(name, -1) + 1
            begin, stop = (min(end, max(last, time)) for time in span_of(operator))
            for what, span in (("gap", (last, begin)), ("operator", (begin, stop))):
                own = length(subtract([span], waits))
                pieces.setdefault((what, name, number), []).append(own)
            last = stop
        own = length(subtract([(last, end)], waits))
        pieces.setdefault(("gap", "the end of the step", 0), []).append(own)
    return pieces


def lateness(timelines: list) -> list[float]:
    """By rank: how much later than the first to come it came to a collective, in ms.

    A step has several collectives (a bucket each); the one where the rank was latest counts, and
    then the median over the steps.
    """
    late = [[] for _ in timelines]
    for number in timelines[0].steps:
        arrivals = [timeline.arrivals_in(number) for timeline in timelines]
        for rank, own in enumerate(arrivals):
            meetings = zip(own, *arrivals, strict=False)
            late[rank].append(max((mine - min(all) for mine, *all in meetings), default=0.0))
    return [median(times) for times in late]
