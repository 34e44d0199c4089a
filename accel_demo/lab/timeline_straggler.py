"""Which rank holds the others up, told from the trace alone.

When a rank comes late once, that says little: the system gives a core to another program now and
then, and on a laptop that takes longer than what one looks for. A slow rank is slow in every step,
and at the same place. So a step is cut into pieces, the operators and the gaps between them,
without the time in which the rank waits for others. A piece counts only where it takes this rank
longer than another in `LEAST_PAIRS` of all pairs of their steps. (Of two ranks that are alike, with
`STEPS_NEEDED` steps, one piece in 4000 looks so by chance.) Then it counts with what lies between
the two ranks, the median over the pairs. A rank is slow where that adds up to at least `LEAST_MS`,
and to `LEAST_SHARE` of what its step takes when nothing disturbs it.
Source: Mann and Whitney, 1947, https://doi.org/10.1214/aoms/1177730491 (the pairs); Hodges and
Lehmann, 1963, https://doi.org/10.1214/aoms/1177704172 (their median)
"""

import math
from bisect import bisect_left, bisect_right
from statistics import median

from accel_demo.lab.timeline_spans import length, span_of, subtract

STEPS_NEEDED = 16
LEAST_PAIRS = 0.85
LEAST_MS = 5.0
LEAST_SHARE = 0.02

# ("operator" or the "gap" before it, its name, which of that name): the ms, step by step
Pieces = dict[tuple[str, str, int], list[float]]


def slow_rank(pieces: list[Pieces]) -> tuple[int | None, list[float]]:
    """The rank that is slow, or None; and by how many ms each is slower than the others.

    `pieces` are those of each rank. Where several are slow, it is the slowest.
    """
    slower = [slower_by(rank, pieces) for rank in range(len(pieces))]
    slowest = max(range(len(pieces)), key=slower.__getitem__)
    undisturbed_ms = math.fsum(short_one(times) for times in pieces[slowest].values())
    is_slow = slower[slowest] >= max(LEAST_MS, LEAST_SHARE * undisturbed_ms)
    return slowest if is_slow else None, slower


def slower_by(rank: int, pieces: list[Pieces]) -> float:
    """The ms by which this rank is slower in each step than the middle one of the others."""
    others = [own for other, own in enumerate(pieces) if other != rank]
    slower = 0.0
    for piece, own in pieces[rank].items():
        if others and all(len(other.get(piece, [])) == len(own) for other in others):
            theirs = [other[piece] for other in others]
            theirs.sort(key=lambda times: (share_longer(own, times), -median(times)))
            times = theirs[len(theirs) // 2]
            if share_longer(own, times) >= LEAST_PAIRS:
                slower += max(0.0, median(mine - other for mine in own for other in times))
    return slower


def share_longer(own: list[float], others: list[float]) -> float:
    """The share of all pairs of these times in which the own one is longer; equal ones are half."""
    ordered = sorted(others)
    shorter = sum(bisect_left(ordered, time) + bisect_right(ordered, time) for time in own)
    return shorter / (2 * len(own) * len(others))


def short_one(times: list[float]) -> float:
    """The shortest of these times when one in five has been left out: it may be an accident."""
    return sorted(times)[len(times) // 5]


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
