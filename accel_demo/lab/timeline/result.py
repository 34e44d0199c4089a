"""Result of `accel-demo timeline`: the steps of each rank, and the bars that show them.

Start and end times are milliseconds since the start of the first shown step, on rank 0's clock.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class RankProfile:
    """Measurements of one rank in a profiled run."""

    trace: str  # path of the trace that torch.profiler wrote
    processes: int
    backend: str
    device: str
    bucket_bytes: list[int]
    clock_ahead_ns: int  # relative to rank 0's clock
    wall_ms: dict[int, float]  # by number of the profiled step


@dataclass(frozen=True)
class Bar:
    """A period in which a rank is in one phase, or runs one collective."""

    phase: str
    name: str  # of the phase or the collective
    step: int
    start_ms: float
    end_ms: float
    bytes_sent: int | None = None  # None if the trace does not contain it
    row: int = 0  # row in its lane; overlapping bars are in different rows


@dataclass(frozen=True)
class ProfiledStep:
    """One training step of one rank."""

    number: int
    start_ms: float
    end_ms: float
    wall_ms: float  # measured with time.perf_counter, not by the profiler
    phases_ms: dict[str, float]
    all_reduce_ms: float
    hidden_ms: float  # part of the all-reduce during which this rank computes backward
    exposed_ms: float  # part of the all-reduce during which this rank only waits


@dataclass(frozen=True)
class RankTimeline:
    """The steps of one rank, the bars that show them, and the medians over the steps."""

    rank: int
    clock_ahead_ms: float  # relative to rank 0's clock; already subtracted from all times
    wall_ms: float
    phases_ms: dict[str, float]
    all_reduce_ms: float
    exposed_ms: float
    hidden_share: float  # of the total all-reduce time in all steps
    late_ms: float  # how long after the first rank this rank reaches a collective
    slower_ms: float  # extra computing time per step, compared with the other ranks
    steps: list[ProfiledStep]
    lanes: dict[str, list[Bar]]  # keys "compute" and "communication"; bars in order of time


@dataclass(frozen=True)
class BucketTrial:
    """Means over the ranks in a run with one bucket size."""

    bucket_mb: float
    buckets: int
    all_reduce_ms: float
    exposed_ms: float
    hidden_share: float
    step_ms: float


@dataclass(frozen=True)
class TimelineResult:
    """Result of the profiled runs. `ranks` are from the run with the last bucket size."""

    processes: int
    backend: str
    device: str
    model: str
    batch_size: int
    accumulate: int
    bucket_mb: float
    bucket_bytes: list[int]
    ranks: list[RankTimeline]
    straggler: int | None  # the slow rank
    sweep: list[BucketTrial]  # empty if there is only one bucket size


def place_in_rows(bars: list[Bar]) -> list[Bar]:
    """Return the bars by time, each in the first free row. Gloo can run all-reduces in parallel."""
    placed, row_ends = [], []
    for bar in sorted(bars, key=lambda bar: (bar.start_ms, -bar.end_ms)):
        free = [row for row, end_ms in enumerate(row_ends) if end_ms <= bar.start_ms + 1e-6]
        row = free[0] if free else len(row_ends)
        row_ends[row : row + 1] = [bar.end_ms]
        placed.append(replace(bar, row=row))
    return placed


def row_count(lane: list[Bar]) -> int:
    return max((bar.row + 1 for bar in lane), default=1)


def step_spans(ranks: list[RankTimeline]) -> dict[int, tuple[float, float]]:
    """Return the span of each step: from the first rank's start to the last rank's end."""
    return {
        steps[0].number: (min(step.start_ms for step in steps), max(step.end_ms for step in steps))
        for steps in zip(*(rank.steps for rank in ranks), strict=True)
    }


def whole_span(ranks: list[RankTimeline]) -> tuple[float, float]:
    """Return the span that contains all steps and bars."""
    shown = [step for rank in ranks for step in rank.steps]
    shown += [bar for rank in ranks for lane in rank.lanes.values() for bar in lane]
    return min(part.start_ms for part in shown), max(part.end_ms for part in shown)
