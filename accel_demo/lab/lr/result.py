"""The result of `accel-demo lr`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LearningRateRow:
    """The training runs with one rule, compared with the single-process runs with the same seeds.

    The lists `final_losses` and `loss_differences` contain a number for each seed. `losses` are
    medians over the seeds, `largest_weight_difference` is the maximum. With the linear rule, which
    multiplies the learning rate by N, the loss differences are small if the rate is low, because
    one step has about the same effect as N steps with 1/N of the rate.
    Source: Goyal et al., 2017, https://arxiv.org/abs/1706.02677
    """

    rule: str
    processes: int
    global_batch: int
    optimizer_steps: int
    learning_rates: list[tuple[int, float]]  # (images seen, rate)
    schedule_ends_at: int | None  # images seen when the rate reaches 0; None if it never does
    losses: list[tuple[int, float]]  # (images seen, loss on test images)
    final_losses: list[float]
    loss_differences: list[float]  # mean distances from the curve of one process
    largest_weight_difference: float


@dataclass(frozen=True)
class LearningRateResult:
    """All training runs of `accel-demo lr`, beginning with the single-process run."""

    samples: int
    seeds: int
    rows: list[LearningRateRow]
