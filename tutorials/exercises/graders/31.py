"""Grade exercise 31: train on one process and on two, and compare every step.

python tutorials/exercises/graders/31.py FILE
"""

import sys
from pathlib import Path

from accel_demo.lab.grading import Wrong, grade, import_answer

SAMPLES, GLOBAL_BATCH, LEARNING_RATE = 128, 16, 0.1
STEPS = SAMPLES // GLOBAL_BATCH
TOLERANCE = 1e-6  # absolute; the weights and the learning rates are about 0.1
EXPECTED_RATES = [LEARNING_RATE * (1 - step / STEPS) for step in range(STEPS)]
RIGHT = "the learning rates and the weights are the same on one process and on two"


def observe(answer: Path, device) -> None:
    import torch
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, GradientState
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    from torch.utils.data import TensorDataset

    AcceleratorState._reset_state(True)  # because the answer creates a new Accelerator
    GradientState._reset_state()
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 5)
    targets = inputs.sum(dim=1, keepdim=True).sin()
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    expected_weights = train_on_one_process(model, inputs, targets)
    read, samples, rates = 0, [], []  # samples since the last step; samples and rate of each step

    def count(module, arguments):
        nonlocal read
        read += len(arguments[0])

    def record(optimizer, *_):
        nonlocal read
        samples.append(read)
        rates.append(optimizer.param_groups[0]["lr"])
        read = 0

    hooks = [model.register_forward_pre_hook(count), register_optimizer_step_pre_hook(record)]
    try:
        train_set = TensorDataset(inputs, targets)
        import_answer(answer).train(model, train_set, GLOBAL_BATCH, LEARNING_RATE)
    finally:
        for hook in hooks:
            hook.remove()
    by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, (samples, flat(model).cpu()))
    judge_batches([samples for samples, _ in by_rank])
    judge_rates(rates, len(by_rank))
    judge_weights([weights for _, weights in by_rank], expected_weights)


def judge_batches(samples_by_rank: list[list[int]]) -> None:
    """Check the number of samples used in each step."""
    processes, steps = len(samples_by_rank), sorted({len(steps) for steps in samples_by_rank})
    if steps == [0]:
        raise Wrong("the optimizer never steps")
    if len(steps) > 1:
        raise Wrong(f"the processes take different numbers of steps: {steps[0]} and {steps[-1]}")
    batches = [sum(step) for step in zip(*samples_by_rank, strict=True)]
    if batches == [GLOBAL_BATCH] * STEPS:
        return
    if sum(batches) == processes * SAMPLES and processes > 1:
        raise Wrong("every process reads all samples: prepare the loader to split them")
    if max(batches) == processes * GLOBAL_BATCH:
        raise Wrong(
            f"a step is taken on {processes * GLOBAL_BATCH} samples instead of {GLOBAL_BATCH}: "
            "every process uses a whole global batch, so divide it among the processes"
        )
    if sum(batches) != SAMPLES:
        raise Wrong(f"{sum(batches)} samples are used in the epoch, instead of {SAMPLES}")
    raise Wrong(f"a step is taken on {batches[0]} samples, instead of {GLOBAL_BATCH}")


def judge_rates(rates: list[float], processes: int) -> None:
    def are(expected: list[float]) -> bool:
        pairs = zip(rates, expected, strict=True)
        return all(abs(rate - other) < TOLERANCE for rate, other in pairs)

    if are(EXPECTED_RATES):
        return
    factor = rates[0] / LEARNING_RATE
    if abs(factor - 1) > TOLERANCE:
        raise Wrong(
            f"the first learning rate is {factor:.3g} times `learning_rate`: the global batch is "
            "the same as on one process, so do not scale the learning rate"
        )
    if are([LEARNING_RATE * max(0, 1 - processes * step / STEPS) for step in range(STEPS)]):
        raise Wrong(
            f"the schedule is over after {STEPS // processes} of {STEPS} steps: the prepared "
            f"scheduler steps {processes} times per optimizer step, once for each process, but its "
            "length assumes only one step"
        )
    if are([LEARNING_RATE * (1 - step / (processes * STEPS)) for step in range(STEPS)]):
        raise Wrong(
            f"only 1/{processes} of the schedule is done when the epoch ends: its length is "
            "computed before prepare splits the loader, but the scheduler steps only once per "
            "optimizer step"
        )
    if len(set(rates)) == 1:
        raise Wrong("the learning rate never changes: step the scheduler after the optimizer")
    used, expected = (" ".join(f"{rate:.4g}" for rate in r) for r in (rates, EXPECTED_RATES))
    raise Wrong(f"the learning rates of the steps are {used} instead of {expected}")


def judge_weights(by_rank: list, expected) -> None:
    if any(not (weights == by_rank[0]).all() for weights in by_rank):
        raise Wrong("the processes end with different weights: is the model prepared?")
    if (difference := (by_rank[0] - expected).abs().max().item()) > TOLERANCE:
        raise Wrong(
            f"the learning rates are correct, but the weights are off by {difference:.1g}: is the "
            "loss a mean, and are the gradients set to zero after each step?"
        )


def train_on_one_process(model, inputs, targets):
    """Train correctly, without Accelerate. Return the new weights, and restore the old weights."""
    import torch
    from torch.nn.functional import mse_loss

    before = flat(model)
    batches = zip(inputs.split(GLOBAL_BATCH), targets.split(GLOBAL_BATCH), strict=True)
    for rate, (batch_inputs, batch_targets) in zip(EXPECTED_RATES, batches, strict=True):
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(mse_loss(model(batch_inputs), batch_targets), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= rate * gradient
    after = flat(model)
    torch.nn.utils.vector_to_parameters(before, model.parameters())
    return after


def flat(model):
    import torch

    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


if __name__ == "__main__":
    sys.exit(grade(__file__, __doc__, observe, right=RIGHT, group_sizes=(1, 2)))
