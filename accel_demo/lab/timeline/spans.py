"""Set operations on periods of time.

`Spans` are sorted and do not overlap. All functions that return `Spans` guarantee this.
"""

import math
from collections.abc import Iterable

Spans = list[tuple[float, float]]  # (start, end) pairs, in ms


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """Return the time that any of the spans covers. They may be unsorted and may overlap."""
    joined: Spans = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def intersect(first: Spans, second: Spans) -> Spans:
    """Return the spans of time that both `first` and `second` cover."""
    common, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            common.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(spans: Spans, removed: Spans) -> Spans:
    """Return the time in `spans` that is not in `removed`."""
    ends = [-math.inf, *(end for _, end in removed)]
    starts = [*(start for start, _ in removed), math.inf]
    return intersect(spans, list(zip(ends, starts, strict=True)))  # all time outside `removed`


def length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)


def span_of(event: dict) -> tuple[float, float]:
    """Return the start and end of a trace event."""
    return event["ts"], event["ts"] + event["dur"]
