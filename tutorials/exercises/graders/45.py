"""Grade exercise 45: simulate runs with random interruptions, and compare the time they lose."""

import math
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from grading import Wrong, grade, import_answer, naming_errors

MOST_LOST = 1.02  # times as much as with the best number of steps
INTERRUPTIONS = 4000  # in the simulation of each run
FACTORS = [1.1**power for power in range(-8, 9)]  # of Young's interval: the candidates


@dataclass(frozen=True)
class Case:
    """The arguments of `save_every`."""

    record: list[tuple[int, float, int]]
    gpus: int
    step_seconds: float
    save_seconds: float
    restart_seconds: float

    @property
    def seconds_between(self) -> float:
        """The mean time between interruptions."""
        gpu_hours = sum(gpus * hours for gpus, hours, _ in self.record)
        return 3600 * gpu_hours / max(1, sum(each[2] for each in self.record)) / self.gpus


CASES = {
    "one earlier run of the same size": Case([(64, 500.0, 10)], 64, 2.0, 20.0, 120.0),
    "a run on more GPUs": Case([(64, 500.0, 10)], 512, 2.0, 20.0, 120.0),
    "earlier runs of different sizes": Case(
        [(8, 1000.0, 2), (256, 100.0, 11), (64, 30.0, 0)], 128, 0.5, 5.0, 60.0
    ),
    "slow restarts": Case([(128, 300.0, 16)], 256, 1.0, 10.0, 900.0),
    "no interruption so far": Case([(16, 400.0, 0), (8, 50.0, 0)], 32, 3.0, 30.0, 120.0),
    "steps that take minutes": Case([(4096, 200.0, 400)], 16384, 240.0, 6.0, 60.0),
}
RIGHT = f"in all {len(CASES)} runs, the time lost is at most 2% more than with the best number"


def lost_share(case: Case, steps: int, seed: int = 45) -> float:
    """Simulate a run that saves after each `steps` steps. Return the share of its time lost.

    The time between two interruptions is exponentially distributed. Steps are lost if they were not
    saved before an interruption; saves and restarts are lost time, too.
    """
    draw = random.Random(seed)
    window = steps * case.step_seconds + case.save_seconds
    total = useful = 0.0
    for _ in range(INTERRUPTIONS):
        alive = draw.expovariate(1 / case.seconds_between)
        total += alive + case.restart_seconds
        useful += math.floor(alive / window) * steps * case.step_seconds
    return 1 - useful / total


def candidates(case: Case) -> set[int]:
    young = math.sqrt(2 * case.save_seconds * case.seconds_between) / case.step_seconds
    return {max(1, round(factor * young)) for factor in FACTORS}


def observe(answer: Path) -> None:
    save_every = import_answer(answer).save_every
    for name, case in CASES.items():
        with naming_errors(f"{name}: save_every raises"):
            steps = save_every(**asdict(case))
        if type(steps) is not int or steps < 1:
            raise Wrong(f"{name}: save_every must return an integer of at least 1, got {steps!r}")
        lost = {each: lost_share(case, each) for each in candidates(case)}
        best = min(lost, key=lost.__getitem__)
        own = lost_share(case, steps)
        if own > MOST_LOST * lost[best]:
            arguments = ", ".join(f"{key}={value}" for key, value in asdict(case).items())
            raise Wrong(
                f"{name}: with a save every {steps:,} steps, {own:.1%} of the time is lost, and "
                f"with the best number {lost[best]:.1%}{hint(case, steps)}.\nThe arguments: "
                f"{arguments}"
            )


def hint(case: Case, steps: int) -> str:
    """Name the mistake that leads to this number of steps, or return ""."""
    between, save, step = case.seconds_between, case.save_seconds, case.step_seconds
    of_record = between * case.gpus
    mistakes = {
        "the number of GPUs of the next run seems to be ignored": _young(save, of_record, step),
        "the hours seem to be taken for seconds": _young(save, between / 3600, step),
        "the interval seems to be in seconds, not in steps": _young(save, between, 1),
        "the factor 2 of Young's rule seems to be missing": _young(save / 2, between, step),
        "the restart seems to be added to the save, but it costs the same for any interval": _young(
            save + case.restart_seconds, between, step
        ),
    }
    for mistake, expected in mistakes.items():
        if abs(steps - expected) <= max(1, 0.01 * expected):
            return f": {mistake}"
    return ": too rarely" if steps > _young(save, between, step) else ": too often"


def _young(save_seconds: float, seconds_between: float, step_seconds: float) -> float:
    return max(1, math.sqrt(2 * save_seconds * seconds_between) / step_seconds)


if __name__ == "__main__":
    sys.exit(grade(__file__, __doc__, observe, right=RIGHT, time_limit=60))
