"""Grade exercise 31: train on one process and on two, and compare every step."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from grading import Wrong, dist, flatten, grade, import_answer, largest_difference, torch

SCHEDULE = "the schedule"
TOLERANCE = 1e-6  # absolute; the weights and the learning rates are about 0.1
SCALING = "Accelerate leaves the learning rate alone"  # heading of the page
RIGHT = "the learning rates and the weights are the same on one process and on two"


@dataclass(frozen=True)
class Case:
    """Arguments of one call of `train`, and the seed of the model and the samples."""

    samples: int
    global_batch: int
    learning_rate: float
    seed: int

    @property
    def steps(self) -> int:
        return self.samples // self.global_batch

    @property
    def rates(self) -> list[float]:
        """Expected learning rates of the steps."""
        return [self.learning_rate * (1 - step / self.steps) for step in range(self.steps)]


CASES = (Case(128, 16, 0.1, seed=0), Case(72, 12, 0.06, seed=1))


def observe(answer: Path, device) -> None:
    train = import_answer(answer).train
    for case in CASES:
        check_training(train, case)


def check_training(train: Callable, case: Case) -> None:
    from accelerate.state import AcceleratorState, GradientState
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    from torch.utils.data import TensorDataset

    AcceleratorState._reset_state(True)  # because the answer creates a new Accelerator
    GradientState._reset_state()
    torch.manual_seed(case.seed)
    inputs = torch.randn(case.samples, 5)
    targets = inputs.sum(dim=1, keepdim=True).sin()
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    expected_weights = train_on_one_process(model, inputs, targets, case)
    read, samples, rates = 0, [], []  # samples since the last step; samples and rate of each step

    def count(module, arguments):
        nonlocal read
        read += len(arguments[0])

    def record(optimizer, *_):
        nonlocal read
        samples.append(read)
        rates.append(float(optimizer.param_groups[0]["lr"]))
        read = 0

    hooks = [model.register_forward_pre_hook(count), register_optimizer_step_pre_hook(record)]
    try:
        train(model, TensorDataset(inputs, targets), case.global_batch, case.learning_rate)
    finally:
        for hook in hooks:
            hook.remove()
    by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, (samples, flatten(model.parameters())))
    samples_by_rank = [samples for samples, _ in by_rank]
    if mistakes := [
        *mistakes_in_batches(samples_by_rank, case),
        *mistakes_in_rates(rates, len(by_rank), case),
    ]:
        others = " and ".join(what for what, _ in mistakes[1:])
        topic, message = mistakes[0]
        read = "" if topic == SCHEDULE else SCALING
        raise Wrong(message + f". Also wrong: {others}" * bool(others), read)
    judge_weights([weights for _, weights in by_rank], expected_weights)


def mistakes_in_batches(samples_by_rank: list[list[int]], case: Case) -> Iterator[tuple[str, str]]:
    """Yield at most one mistake in the samples per step, as a topic and a message.

    Raise `Wrong` if the learning rates cannot be judged.
    """
    processes, steps = len(samples_by_rank), sorted({len(steps) for steps in samples_by_rank})
    if steps[0] == 0:
        raise Wrong("the optimizer never steps")
    if len(steps) > 1:
        raise Wrong(f"the processes take different numbers of steps: {steps[0]} and {steps[-1]}")
    batches = [sum(step) for step in zip(*samples_by_rank, strict=True)]
    expected, topic = case.global_batch, "the samples of a step"
    if batches == [expected] * case.steps:
        return
    if sum(batches) == processes * case.samples and processes > 1:
        raise Wrong("every process reads all samples: prepare the loader to split them", SCALING)
    if max(batches) == processes * expected and processes > 1:
        yield (
            topic,
            f"a step uses {processes * expected} samples instead of {expected}, because every "
            "process uses a whole global batch",
        )
    elif batches[0] != expected:
        raise Wrong(f"a step uses {batches[0]} samples instead of {expected}", SCALING)
    else:
        used = f"{sum(batches)} samples are used in the epoch instead of {case.samples}"
        raise Wrong(used, SCALING)


def mistakes_in_rates(rates: list[float], processes: int, case: Case) -> Iterator[tuple[str, str]]:
    """Yield the mistakes in the learning rates, each as a topic and a message.

    `rates` are compared with a schedule for their own number of steps, which is too small if the
    batches are too large.
    """
    steps, factor = len(rates), rates[0] / case.learning_rate

    def decrease_to_zero_in(length: float) -> bool:
        expected = [rates[0] * max(0, 1 - step / length) for step in range(steps)]
        pairs = zip(rates, expected, strict=True)
        return all(abs(rate - other) < TOLERANCE for rate, other in pairs)

    if abs(factor - 1) > TOLERANCE:
        yield (
            "the first learning rate",
            f"the first learning rate is {factor:.3g} times `learning_rate`"
            + (
                ", although the global batch should be the same as on one process"
                if processes > 1
                else ": is the scheduler stepped before the optimizer?" * (factor < 1)
            ),
        )
    if decrease_to_zero_in(steps):
        return
    if decrease_to_zero_in(steps / processes):
        yield (
            SCHEDULE,
            f"the schedule ends after {steps // processes} of {steps} steps: the prepared "
            f"scheduler advances {processes} times per optimizer step, but the length of the "
            "schedule assumes only one",
        )
    elif decrease_to_zero_in(steps * processes):
        yield (
            SCHEDULE,
            f"only 1/{processes} of the schedule is done when the epoch ends: its length comes "
            "from the loader before prepare, but the scheduler advances only once per optimizer "
            "step",
        )
    elif len(set(rates)) == 1 and steps > 1:
        yield SCHEDULE, "the learning rate never changes: the scheduler does not advance"
    else:
        used = " ".join(f"{rate:.4g}" for rate in rates)
        line = (case.learning_rate * (1 - step / steps) for step in range(steps))
        expected = " ".join(f"{rate:.4g}" for rate in line)
        yield SCHEDULE, f"the learning rates of the steps are {used} instead of {expected}"


def judge_weights(by_rank: list, expected) -> None:
    if any(not (weights == by_rank[0]).all() for weights in by_rank):
        raise Wrong("the processes end with different weights: is the model prepared?")
    if (difference := largest_difference(by_rank[0], expected)) > TOLERANCE:
        raise Wrong(
            f"the learning rates are correct, but the weights are off by {difference:.1g}: is the "
            "loss a mean, and are the gradients set to zero after each step?"
        )


def train_on_one_process(model, inputs, targets, case: Case):
    """Train correctly, without Accelerate. Return the new weights, and restore the old weights."""
    before = flatten(model.parameters())
    split = (samples.split(case.global_batch) for samples in (inputs, targets))
    for rate, batch_inputs, batch_targets in zip(case.rates, *split, strict=True):
        parameters = list(model.parameters())
        loss = torch.nn.functional.mse_loss(model(batch_inputs), batch_targets)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= rate * gradient
    after = flatten(model.parameters())
    torch.nn.utils.vector_to_parameters(before, model.parameters())
    return after


if __name__ == "__main__":
    sys.exit(grade(__file__, __doc__, observe, right=RIGHT, group_sizes=(1, 2)))
