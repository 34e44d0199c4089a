"""Which rank holds the others up, told from the trace alone.

How long a rank computes in a step says little on a busy machine: the system gives a core to another
program now and then, and on a laptop that takes longer than what one looks for. But it can only add
to a time, and it strikes at another place each time; a slow rank is slow in every step, at the same
place. So a step is cut into pieces, the operators and the gaps between them, without the time in
which the rank waits for others. A piece counts where the shortest time of this rank is longer than
the median of the others', and by as much as it is. A piece that counts by chance would have been
longer than usual in each of `STEPS_NEEDED` steps.

Medians and quantiles of whole steps, of pairs of steps and of phases tell much less: there the
accidents of all pieces add up. What this cannot see is a rank that is held up in some steps only,
or at another place each time.
Source: Chen and Revels, 2016, https://arxiv.org/abs/1608.04295 (what disturbs a program only adds
to its time, so the shortest time is the one to trust)
"""

import math
from statistics import median

from accel_demo.lab.timeline.spans import length, span_of, subtract

STEPS_NEEDED = 32
LEAST_MS = 5.0
LEAST_SHARE = 0.02  # of a step: two equal ranks differ by some of its length

# ("operator" or the "gap" before it, its name, which of that name): the ms, step by step
Pieces = dict[tuple[str, str, int], list[float]]


def slow_rank(pieces: list[Pieces]) -> tuple[int | None, list[float]]:
    """The rank that is slow, or None; and by how many ms each is slower than the others.

    `pieces` are those of each rank. Where several are slow, it is the slowest. Slow is a rank that
    is slower by `LEAST_MS`, and by `LEAST_SHARE` of what its step takes when nothing disturbs it.
    """
    slower = [slower_by(rank, pieces) for rank in range(len(pieces))]
    slowest = max(range(len(pieces)), key=slower.__getitem__)
    undisturbed_ms = math.fsum(min(times) for times in pieces[slowest].values())
    is_slow = slower[slowest] >= max(LEAST_MS, LEAST_SHARE * undisturbed_ms)
    return slowest if is_slow else None, slower


def slower_by(rank: int, pieces: list[Pieces]) -> float:
    """The ms by which this rank is slower than the others in each step, or more."""
    others = [own for other, own in enumerate(pieces) if other != rank]
    steps = max(map(len, pieces[rank].values()))
    slower = 0.0
    for piece, times in pieces[rank].items():
        if others and len(times) == steps:  # what is not in every step cannot be slow in it
            usual = median(time for other in others for time in other.get(piece, [0.0]))
            slower += max(0.0, min(times) - usual)
    return slower


def pieces_of(timeline) -> Pieces:
    """The pieces of a rank's steps, from its `phases.Timeline`."""
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
