"""Stretches of time: together, in common, one without the other.

`Spans` are in order, and apart from each other; each function gives such a list.
"""

import math

Spans = list[tuple[float, float]]  # (start, end), here in ms


def union(spans) -> Spans:
    joined = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def intersect(one: Spans, other: Spans) -> Spans:
    common, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            common.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(spans: Spans, taken: Spans) -> Spans:
    ends = [-math.inf, *(end for _, end in taken)]
    starts = [*(start for start, _ in taken), math.inf]
    return intersect(spans, list(zip(ends, starts, strict=True)))  # with what lies between them


def length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)


def span_of(event: dict) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]
