"""Grade exercise 22: find unused parameters of hidden models, and train on 3 processes.

The bonus is graded by bonus_22.py, and only if the rest is right. It does not affect the exit code.
"""

import random
import sys
from collections.abc import Callable
from pathlib import Path

import grading
from grading import (
    NotFinished,
    Wrong,
    check,
    dist,
    grade,
    import_answer,
    run_answer,
    shorten,
    torch,
)

BONUS = Path(__file__).with_name("bonus_22.py")
GROUP_SIZES = (3,)
RANKS, STEPS, BATCH, FEATURES, LEARNING_RATE = 3, 6, 8, 6, 0.3
SEARCHES, TRAININGS = range(8), range(8, 10)  # seeds of the models for each function
TOLERANCE = 1e-5  # absolute; with a wrong average, weights differ by more than 1e-3
PATIENCE = 30  # seconds; a correct answer takes less than a second
# {mistake: function that combines the gradients of the ranks with this mistake, or None: untrained}
# `used` is the number of ranks that use the parameter. The gradients of the others are 0.
MISTAKES = {
    "train does not change the weights of `model`: train it in place": None,
    "every rank trains alone, so the ranks end with different weights: does each forward go "
    "through DDP?": lambda gradients, used: gradients[dist.get_rank()],
    "each weight update is 3 times too large: the gradients of the ranks are added "
    "instead of averaged, or the learning rate was multiplied": lambda gradients, used: sum(
        gradients
    ),
    "train averages a gradient over only the ranks that use the parameter: the other ranks "
    "count too, with a gradient of 0": lambda gradients, used: sum(gradients) / max(1, used),
}
RIGHT = "unused_parameters is correct for all models, and train averages correctly on 3 processes"


def right(answer: Path) -> str:
    """Return what to print for a right answer, with one sentence about the bonus."""
    try:
        check(run_answer(str(BONUS), answer), GROUP_SIZES)
    except NotFinished as late:
        return f"{RIGHT}. No verdict on the bonus: {late}."
    except Wrong as mistake:
        if str(mistake).startswith("a function is not implemented yet"):
            return f"{RIGHT}. The bonus is not implemented yet."
        return f"{RIGHT}. The bonus is not solved: {mistake}."
    return f"{RIGHT}. The bonus is solved: on 3 processes, share_gradients matches DDP bit for bit."


def observe(answer: Path, device) -> None:
    module = import_answer(answer)
    for seed in SEARCHES:
        check_search(module.unused_parameters, seed, device)
    for seed in TRAININGS:
        check_training(module.train, seed, device)


def check_search(unused_parameters: Callable, seed: int, device) -> None:
    """Call `unused_parameters` with a hidden model, and check its result and its side effects."""
    model = make_model(seed).to(device)
    loss, detached = make_loss(model, seed, device)
    generator = random.Random(seed)
    for parameter in model.parameters():  # from an earlier step
        if parameter.requires_grad and generator.random() < 0.5:
            parameter.grad = torch.ones_like(parameter)
    before = {name: values(parameter.grad) for name, parameter in model.named_parameters()}
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(
        loss, list(trainable.values()), retain_graph=True, allow_unused=True
    )
    gradients = dict(zip(trainable, gradients, strict=True))

    with grading.naming_errors("unused_parameters fails with"):
        returned = unused_parameters(model, loss)
    for name, parameter in model.named_parameters():
        if values(parameter.grad) != before[name]:
            raise Wrong(f"unused_parameters changes the `.grad` of {name}")
    judge_names(returned, gradients, before, detached)
    try:
        loss.backward()
    except RuntimeError as error:
        raise Wrong(
            f"after unused_parameters, `loss.backward()` fails with a {type(error).__name__}: the "
            "function frees the graph of the loss"
        ) from None


def judge_names(returned, gradients: dict, before: dict, detached: str) -> None:
    """Compare the names with `gradients`, which maps trainable parameters to gradients or None."""
    try:
        names = list(returned)
    except TypeError:
        names = [returned]
    if not all(isinstance(name, str) for name in names) or isinstance(returned, str):
        raise Wrong(f"unused_parameters returns {shorten(returned)} instead of a list of names")
    for name in names:
        if name not in before:
            raise Wrong(
                f"unused_parameters returns {shorten(name)}, which is not a name in "
                "`model.named_parameters()`"
            )
        if name not in gradients:
            raise Wrong(f"unused_parameters lists {name}, which is frozen")
        if gradients[name] is not None and not gradients[name].any():
            raise Wrong(
                f"unused_parameters lists {name}, although the loss reaches it: its gradient is 0, "
                "not missing"
            )
        if gradients[name] is not None:
            raise Wrong(f"unused_parameters lists {name}, although the loss reaches it")
    for name, gradient in gradients.items():
        if gradient is None and name not in names:
            reason = ""
            if before[name] is not None:
                reason = ". Its `.grad` is left over from an earlier step"
            elif name.startswith(f"heads.{detached}."):
                reason = ". The loss uses this head's predictions only after `detach()`"
            raise Wrong(
                f"unused_parameters does not list {name}, which the loss does not reach{reason}"
            )
    if len(set(names)) < len(names):
        raise Wrong("unused_parameters lists the same name more than once")


def check_training(train: Callable, seed: int, device) -> None:
    """Train a hidden model, and compare its weights with those of a single process."""
    rank, model, batches = dist.get_rank(), make_model(seed).to(device), make_batches(seed, device)
    untrained, expected = weights_of(model), train_in_one_process(seed, device)
    torch.manual_seed(seed)
    try:
        train(model, batches[rank], LEARNING_RATE)
    except NotImplementedError:
        raise
    except (Exception, SystemExit) as error:
        raise training_error(error) from None
    weights = weights_of(model)
    by_rank = [None] * RANKS
    dist.all_gather_object(by_rank, {name: tensor.cpu() for name, tensor in weights.items()})
    distances = distances_between(weights, expected)
    if max(distances.values()) <= TOLERANCE:
        return
    for mistake, combine in MISTAKES.items():
        wrong_weights = train_in_one_process(seed, device, combine) if combine else untrained
        if max(distances_between(weights, wrong_weights).values()) <= TOLERANCE:
            raise Wrong(mistake)
    for name, parameter in make_model(seed).named_parameters():
        if not parameter.requires_grad and distances[name] > 0:
            raise Wrong(f"train changes {name}, which is frozen")
    name = max(distances, key=lambda name: distances[name])
    if any(not torch.equal(other[name], by_rank[0][name]) for other in by_rank):
        raise Wrong(
            f"after {STEPS} steps of train, the ranks have different values of {name}. If their "
            "tasks differ, do they still all-reduce the gradients of the same parameters?"
        )
    raise Wrong(
        f"after {STEPS} steps of train, {name} differs on rank {rank} by up to "
        f"{distances[name]:.1g} from the expected weights. In each step, is its gradient the mean "
        "over all ranks?"
    )


def training_error(error: BaseException) -> Wrong:
    """Describe an error that `train` raised. DDP's messages are long and list several causes."""
    message = str(error)
    enabled = "`find_unused_parameters=True` is enabled"
    if "Expected to have finished reduction" in message and enabled not in message:
        return Wrong(
            "train fails in its second step, because DDP is still waiting for gradients of the "
            "first step: it expects a gradient for every parameter"
        )
    if "training graph has changed" in message:
        return Wrong(
            "train fails, because static_graph=True promises that every step uses the same "
            "parameters, but the tasks change"
        )
    return Wrong(f"train fails with {grading.describe_error(error)}")


def make_model(seed: int):
    """Return a model with the same weights on all ranks, and with heads in a random order.

    Two heads share a layer, one layer is frozen, and one parameter belongs to no head.
    """
    nn = torch.nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            tasks = tasks_of(seed)
            self.trunk = nn.Linear(FEATURES, 8)
            self.adapter = nn.Linear(8, 8).requires_grad_(False)
            self.heads = nn.ModuleDict(
                {
                    task: nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))
                    for task in sorted(tasks)
                }
            )
            self.heads[tasks[1]][0] = self.heads[tasks[0]][0]  # shared
            self.temperature = nn.Parameter(torch.ones(1))  # never used

        def forward(self, inputs, task):
            features = self.adapter(torch.tanh(self.trunk(inputs)))
            return self.heads[task](features)

    torch.manual_seed(seed)
    return Model()


def tasks_of(seed: int) -> list[str]:
    """Return the four tasks in a random order. No batch uses the last task."""
    return random.Random(seed).sample(["age", "color", "depth", "shape"], 4)


def make_loss(model, seed: int, device) -> tuple:
    """Return a loss of two heads, and the task of a third head, which has no effect on gradients.

    If the seed is odd, all gradients of the second head are 0.
    """
    tasks = random.Random(seed).sample(tasks_of(seed), 3)
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(BATCH, FEATURES, generator=generator).to(device)
    first, second, third = (model(inputs, task) for task in tasks)
    weight = 0 if seed % 2 else 1
    return (first * third.detach()).mean() + weight * second.square().mean(), tasks[2]


def make_batches(seed: int, device) -> list[list[tuple]]:
    """Return the batches of each rank: tuples of inputs, targets and a task."""
    generator, tasks = torch.Generator().manual_seed(seed), random.Random(seed)
    batches = []
    for _ in range(RANKS):
        inputs = torch.randn(STEPS, BATCH, FEATURES, generator=generator)
        targets = inputs.sum(dim=2, keepdim=True).sin()
        names = tasks.choices(tasks_of(seed)[:3], k=STEPS)
        batches.append(list(zip(inputs.to(device), targets.to(device), names, strict=True)))
    return batches


def train_in_one_process(seed: int, device, combine: Callable | None = None) -> dict:
    """Train on all ranks' batches with the combined gradients, and return the weights.

    `combine(gradients, used)` gets one gradient per rank, with 0 for the ranks that do not use the
    parameter, and the number of ranks that use it. By default, it is the mean over all ranks.
    """
    model = make_model(seed).to(device)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for step in zip(*make_batches(seed, device), strict=True):
        outputs = [model(inputs, task) for inputs, _, task in step]
        targets = [targets for _, targets, _ in step]
        losses = map(torch.nn.functional.mse_loss, outputs, targets)
        by_rank = [torch.autograd.grad(loss, trainable, allow_unused=True) for loss in losses]
        for parameter, *gradients in zip(trainable, *by_rank, strict=True):
            used = sum(gradient is not None for gradient in gradients)
            zeros = torch.zeros_like(parameter)
            gradients = [zeros if gradient is None else gradient for gradient in gradients]
            mean = sum(gradients) / RANKS
            with torch.no_grad():
                parameter -= LEARNING_RATE * (combine(gradients, used) if combine else mean)
    return weights_of(model)


def weights_of(model) -> dict:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def distances_between(weights: dict, others: dict) -> dict[str, float]:
    """Return the largest difference in each parameter. A NaN is an infinite difference."""
    return {name: grading.largest_difference(weights[name], others[name]) for name in others}


def values(gradient) -> list | None:
    return None if gradient is None else gradient.tolist()


if __name__ == "__main__":
    options = {"group_sizes": GROUP_SIZES, "patience": PATIENCE}
    sys.exit(grade(__file__, __doc__, observe, right=right, **options))
