"""The pairs of runs that `accel-demo parity` compares, and the result for each of them."""

from dataclasses import dataclass, field

from accel_demo.config import TrainConfig
from accel_demo.lab.output import MeasuredFinding

# BOUND is how much the weights may differ between runs that add the same numbers in a different
# order. One rounding changes a weight below 1 by at most 3e-8, so after BOUND_STEPS steps with a
# few roundings each, the difference is still far below BOUND.
BOUND, BOUND_STEPS = 1e-5, 20
SAME_BITS, WITHIN_BOUND, NOTHING = "same bits", f"within {BOUND:g}", "nothing"


@dataclass(frozen=True)
class ParityRun:
    """One training run. `script` is "train", "train_plain", "train_dp" or "train_ddp"."""

    script: str
    processes: int = 1
    accumulate: int = 1
    batch_size: int = 32  # samples in a micro-batch of one process

    @property
    def name(self) -> str:
        return f"{self.script}-{self.processes}x{self.accumulate}x{self.batch_size}"


@dataclass(frozen=True)
class Pair:
    """Two runs to compare. `kind` is "versions", "accumulated" or "one batch"."""

    kind: str
    first: ParityRun
    second: ParityRun

    @property
    def name(self) -> str:
        processes, images = self.first.processes, self.first.batch_size
        if self.kind == "versions":
            return f"{self.first.script}.py and {self.second.script}.py"
        if self.kind == "accumulated":
            return f"train.py: {processes} processes and 1 process accumulating {processes} batches"
        return f"train.py: {processes} processes and 1 process with a batch of {processes * images}"


@dataclass(frozen=True)
class StateDifference:
    """Difference between two state dicts.

    `weights` is the largest difference between parameters. `statistics` is the largest difference
    between BatchNorm's running statistics, or None for a model without BatchNorm. If only one of
    two tensors contains NaN, their difference is infinite. `same_weights` compares the bits of the
    parameters. `same_file` compares all tensors, including BatchNorm's batch counters.
    """

    weights: float
    statistics: float | None
    same_weights: bool
    same_file: bool


@dataclass
class ParityRow:
    """Result for a pair. `promised` is SAME_BITS, WITHIN_BOUND (for weights only) or NOTHING."""

    pair: str
    kind: str
    connected_processes: list[int]
    difference: StateDifference
    promised: str
    why: str = ""  # why the files differ; "" if they are identical

    @property
    def keeps_promise(self) -> bool:
        """Whether the difference is as small as promised."""
        if self.promised == SAME_BITS:
            return self.difference.same_file
        return self.promised == NOTHING or self.difference.weights <= BOUND


@dataclass
class ParityResult:
    """The compared pairs, and the settings that all runs have in common."""

    config: TrainConfig
    device: str
    rows: list[ParityRow]
    findings: list[MeasuredFinding] = field(init=False)  # the rows that break their promise

    def __post_init__(self) -> None:
        self.findings = [
            MeasuredFinding("weights", None, f"{row.pair}: the weights differ too much")
            for row in self.rows
            if not row.keeps_promise
        ]


def plan(process_counts: list[int], batch_size: int) -> list[Pair]:
    """Return the pairs of runs to compare for each process count."""
    pairs = []
    for count in process_counts:
        accelerate = ParityRun("train", count, batch_size=batch_size)
        for script in ["train_plain", "train_dp", "train_ddp"] if count == 1 else ["train_ddp"]:
            other = ParityRun(script, count, batch_size=batch_size)
            pairs.append(Pair("versions", accelerate, other))
        if count > 1:
            accumulated = ParityRun("train", 1, accumulate=count, batch_size=batch_size)
            pairs.append(Pair("accumulated", accelerate, accumulated))
            one_batch = ParityRun("train", 1, batch_size=count * batch_size)
            pairs.append(Pair("one batch", accelerate, one_batch))
    return pairs
