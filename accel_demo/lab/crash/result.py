"""Results of `accel-demo crash`. All times are in seconds."""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Kill:
    """A planned kill of one rank. `actual_phase` and `seconds` are set after the kill.

    A phase is "save", "step" or "start-up". The kill interrupts a start-up, or the first save or
    step after optimizer step `step`, when `fraction` of the usual duration has passed.
    """

    planned_phase: str
    rank: int
    step: int
    fraction: float
    actual_phase: str = ""
    seconds: float = 0.0  # since the start of the launch


@dataclass(frozen=True)
class LaunchResult:
    """Result of one launch of the killed run. Checkpoints are listed newest first.

    `started_at` is the time since the start of the first launch. `points` contains (seconds since
    `started_at`, optimizer step) pairs. `resumed_after_step` is 0 if the launch started from the
    beginning, and None if it was killed before it resumed or performed a step.
    """

    started_at: float
    has_connected: bool
    resumed_after_step: int | None
    resumed_from: str | None
    used_newest_checkpoint: bool
    used_damaged_checkpoint: bool
    points: list[tuple[float, int]]
    replayed_steps: int
    kill: Kill | None
    complete_checkpoints: list[str]
    damaged_checkpoints: list[str]
    left_unfinished_checkpoint: bool


@dataclass(frozen=True)
class RunComparison:
    """Which weights of the two runs differ, and in how many steps their metrics are equal."""

    tensors: int
    different_tensors: list[str]
    logged_steps: int
    equal_logged_steps: int


@dataclass(frozen=True)
class CrashResult:
    """Results of both runs, the uninterrupted and the killed, and their comparison."""

    script: str
    processes: int
    seed: int
    steps: int
    usual_seconds: dict[str, float]  # {phase: usual duration}
    uninterrupted_points: list[tuple[float, int]]
    launches: list[LaunchResult]
    comparison: RunComparison

    @property
    def passed(self) -> bool:
        """True if the two runs are equal and each launch used the newest complete checkpoint."""
        return (
            not self.comparison.different_tensors
            and self.comparison.equal_logged_steps == self.comparison.logged_steps
            and all(launch.used_newest_checkpoint for launch in self.launches)
            and not any(launch.used_damaged_checkpoint for launch in self.launches)
        )


def compare(uninterrupted: Path, killed: Path) -> RunComparison:
    """Compare all weights bit for bit, and the metrics of all steps except `images_per_second`."""
    from safetensors.numpy import load_file  # slow: imports numpy

    first, second = (load_file(run / "model.safetensors") for run in (uninterrupted, killed))
    different = first.keys() ^ second.keys()
    for name in first.keys() & second.keys():
        a, b = first[name], second[name]
        if a.shape != b.shape or a.tobytes() != b.tobytes():
            different.add(name)
    logs = []
    for run in (uninterrupted, killed):
        metrics = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        logs.append([{**line, "images_per_second": 0} for line in metrics if "train_loss" in line])
    return RunComparison(
        tensors=len(first),
        different_tensors=sorted(different),
        logged_steps=max(map(len, logs)),
        equal_logged_steps=sum(a == b for a, b in zip(*logs, strict=False)),
    )
