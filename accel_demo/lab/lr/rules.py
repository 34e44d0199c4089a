"""The rules that `accel-demo lr` compares, and the settings that all its training runs share."""

from dataclasses import dataclass

BATCH = 32  # global batch on one process
TEST_IMAGES = 500
LOSSES = 8  # number of losses to record at equal intervals, not counting the initial loss


@dataclass(frozen=True)
class ScalingRule:
    """A rule for adapting a script to N processes.

    `is_divided`: divide the batch size by N, so that the global batch does not change.
    `is_split`: set `split_batches`, so that Accelerate splits each batch among the processes.
    `steps_per_process`: let Accelerate step the scheduler as it does by default: N times for each
        optimizer step, or once if `is_split`.
    `sized_before`: compute the length of the schedule before `prepare` shards the loader.
    `power`: multiply the learning rate by N**power.
    """

    name: str
    is_divided: bool = False
    is_split: bool = False
    steps_per_process: bool = False
    sized_before: bool = False
    power: float = 0.0


RULES = [
    ScalingRule("right", is_divided=True),
    ScalingRule("right, by split_batches", is_split=True, steps_per_process=True),
    ScalingRule("scheduler stepped ×N", is_divided=True, steps_per_process=True),
    ScalingRule("global batch ×N"),
    ScalingRule("global batch ×N, by default", steps_per_process=True, sized_before=True),
    ScalingRule("global batch ×N, learning rate ×√N", power=0.5),
    ScalingRule("global batch ×N, learning rate ×N", power=1.0),
]
