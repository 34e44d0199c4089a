"""The result of `accel-demo timeline`: the steps of each rank, and the bars that show them.

Start and end times are milliseconds since the start of the first step shown, on rank 0's clock.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from accel_demo.lab.output import MeasuredFinding


@dataclass(frozen=True)
class RankProfile:
    """Measurements of one rank in a profiled run."""

    trace: str  # path of the trace that torch.profiler wrote
    processes: int
    backend: str
    device: str
    bucket_bytes: list[list[int]]  # of each model wrapped in DistributedDataParallel
    clock_ahead_ns: int  # relative to rank 0's clock
    wall_ms: dict[int, float]  # keys: numbers of the steps
    # Backward passes before an optimizer step in which one model averages its gradients (median)
    averages: float = 1.0
    reads: list[list] = field(default_factory=list)  # [file, line, method, share of the steps]
    network: str = ""  # name of its network namespace


@dataclass(frozen=True)
class Bar:
    """A period in which a rank is in one phase, or runs one collective."""

    phase: str
    name: str  # of the phase or the collective
    step: int
    start_ms: float
    end_ms: float
    bytes_sent: int | None = None  # None if the trace does not contain it
    row: int = 0  # within its lane; overlapping bars are in different rows


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
    sending_backwards: int  # backward passes in which a collective that reduces was started


@dataclass(frozen=True)
class RankTimeline:
    """The steps of one rank, the bars that show them, and the medians over the steps."""

    rank: int
    clock_ahead_ms: float  # relative to rank 0's clock; already subtracted from all times
    wall_ms: float
    phases_ms: dict[str, float]
    all_reduce_ms: float
    exposed_ms: float
    hidden_share: float  # hidden fraction of the all-reduce time in all steps
    late_ms: float  # how much later than the first rank this rank starts a collective
    slower_ms: dict[str, float]  # extra time per step by phase, compared with the other ranks
    steps: list[ProfiledStep]
    lanes: dict[str, list[Bar]]  # keys "activity" and "collectives"; bars sorted by start time


@dataclass(frozen=True)
class BucketTrial:
    """Medians over the runs with one bucket size. Each run's value is the mean over the ranks.

    `step_interval` is the 90 % confidence interval of `step_ms` (empty with fewer than five runs).
    """

    bucket_mb: float
    buckets: int
    all_reduce_ms: float
    exposed_ms: float
    hidden_share: float
    backward_ms: float
    step_ms: float
    step_interval: list[float]


@dataclass(frozen=True)
class TimelineResult:
    """The result of the profiled runs. `ranks` comes from the run with the last bucket size.

    `settings` are those of our own training loop: model, batch_size, accumulate, bucket_mb, rate.
    Of the reader's script, they are command_line and exit_code.
    """

    processes: int
    backend: str
    device: str
    description: str
    settings: dict[str, Any]
    bucket_bytes: list[list[int]]
    ranks: list[RankTimeline]
    straggler: int | None  # the slow rank, if any
    findings: list[MeasuredFinding]
    sweep: list[BucketTrial] = field(default_factory=list)  # empty with only one bucket size


def place_in_rows(bars: list[Bar]) -> list[Bar]:
    """Sort the bars by time, and put overlapping bars (parallel all-reduces) into separate rows."""
    placed, row_ends = [], []
    for bar in sorted(bars, key=lambda bar: (bar.start_ms, -bar.end_ms)):
        free = [row for row, end_ms in enumerate(row_ends) if end_ms <= bar.start_ms + 1e-6]
        row = free[0] if free else len(row_ends)
        row_ends[row : row + 1] = [bar.end_ms]
        placed.append(replace(bar, row=row))
    return placed


def row_count(lane: list[Bar]) -> int:
    return max((bar.row + 1 for bar in lane), default=1)


def steps_shown(rank: RankTimeline) -> list[ProfiledStep]:
    """Return the steps that are in the lanes."""
    shown = {bar.step for bar in rank.lanes["activity"]}
    return [step for step in rank.steps if step.number in shown]


def step_spans(ranks: list[RankTimeline]) -> dict[int, tuple[float, float]]:
    """Return the span of each step shown, from its earliest start to its latest end on any rank."""
    return {
        steps[0].number: (min(step.start_ms for step in steps), max(step.end_ms for step in steps))
        for steps in zip(*map(steps_shown, ranks), strict=True)
    }


def whole_span(ranks: list[RankTimeline]) -> tuple[float, float]:
    """Return the span that contains all steps shown."""
    shown = [step for rank in ranks for step in steps_shown(rank)]
    return min(step.start_ms for step in shown), max(step.end_ms for step in shown)
