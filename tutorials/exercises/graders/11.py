"""Grade exercise 11: train with each of the four functions, and check the final weights."""

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from unittest.mock import patch

from grading import Wrong, flatten, grade, import_answer, largest_difference, naming_errors, torch

from accel_demo.wording import counted

VERSIONS = ("plain_step", "data_parallel_step", "ddp_step", "accelerate_step")
BATCH, MAX_NORM, TOLERANCE = 8, 0.7, 1e-5
SIZES = (10, 0.1, 5, 10)  # scale of the pixels in each step; the second gradient is not clipped
RIGHT = "all four versions clip correctly and end with the same weights, on one process and on two"
# {mistake: description}. `reference` trains with a mistake to find the weights that it leads to.
MISTAKES = {
    "never": "does not clip: the final weights are the same as without clipping",
    "before the average": "clips the gradients of each process before they are averaged: clip the "
    "average, which is what the optimizer uses",
    "without the average": "does not average the gradients over the processes, so each process "
    "has different weights",
    "each value": "limits each element of the gradients instead of the total norm",
    "each weight": "limits the norm of each weight's gradient instead of the total norm",
    "scale": "changes gradients whose total norm is below max_norm: these should stay as they are",
    "no reset": "adds the gradients of each batch to those of the previous batch",
    "no gradients": "does not change the weights: the optimizer has no gradients",
    **dict.fromkeys(
        ("divide, clip", "clip, divide"),
        "divides the gradients by the number of processes, but they are already averaged",
    ),
    **dict.fromkeys(
        ("multiply, clip", "clip, multiply"),
        "adds up the gradients of all processes, but they are already averaged",
    ),
    "divide max_norm": "limits the norm to max_norm divided by the number of processes, instead of "
    "max_norm",
    "multiply max_norm": "limits the norm to max_norm times the number of processes, instead of "
    "max_norm",
}
REPLICA = "Each process has a replica of the model"  # heading of the page
EARLY = "clips too early: there are no gradients yet when it clips"
LATE = "clips the gradients after the optimizer has used them"


def observe(answer: Path, device) -> None:
    from accelerate import Accelerator

    from accel_demo.processes.devices import use_cpu

    accelerator = Accelerator(cpu=use_cpu())
    events: list[str] = []
    functions = ("clip_grad_norm_", "clip_grad_value_")
    recorders = {name: recorded(getattr(torch.nn.utils, name), events) for name in functions}
    with patch.multiple(torch.nn.utils, **recorders):
        module = import_answer(answer)
        unlike = ""
        for version in VERSIONS if accelerator.num_processes == 1 else VERSIONS[2:]:
            step = getattr(module, version, None)
            if step is None:
                raise Wrong(f"the file has no function {version}")
            events.clear()
            with naming_errors(f"{version} fails with"):
                weights = train_with(step, version, accelerator, events)
            judge(f"{version}{unlike}", weights, list(events), accelerator)
            unlike = f", unlike {version},"


def recorded(clip_function: Callable, events: list[str]) -> Callable:
    """Return `clip_function`, changed to record in `events` whether there is anything to clip."""

    @wraps(clip_function)
    def clip_and_record(parameters, *arguments, **options):
        weights = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        has_gradients = any(weight.grad is not None and weight.grad.any() for weight in weights)
        events.append("clip" if has_gradients else "clip nothing")
        return clip_function(weights, *arguments, **options)

    return clip_and_record


def judge(name: str, weights, events: list[str], accelerator) -> None:
    """Raise `Wrong` if the weights are wrong. `events` are the answer's optimizer steps and clips.

    The events do not show whether an answer is right, because it may clip without PyTorch's
    functions.
    """

    def distance(mistake: str) -> float:
        expected = reference(mistake, accelerator.process_index, accelerator.num_processes)
        return largest_difference(weights, expected)

    if distance("") <= TOLERANCE:
        return
    if (steps := events.count("step")) != len(SIZES):
        raise Wrong(
            f"{name} performs {counted(steps, 'optimizer step')} on {len(SIZES)} batches, "
            "instead of one on each"
        )
    for mistake, description in MISTAKES.items():
        if distance(mistake) <= TOLERANCE:
            if mistake == "never" and events[0] == "clip nothing":
                description = EARLY
            elif mistake == "never" and events[0] == "step" and set(events) != {"step"}:
                description = LATE
            is_about_average = any(word in mistake for word in ("average", "divide", "multiply"))
            raise Wrong(f"{name} {description}", REPLICA if is_about_average else "")
    raise Wrong(
        f"{name} ends with weights that differ from the expected weights by "
        f"up to {distance(''):.1e}, but at most {TOLERANCE:.0e} is allowed"
    )


def train_with(step: Callable, version: str, accelerator, events: list[str]):
    """Call the learner's function on each batch, and return the weights."""
    network, optimizer = model_and_optimizer(accelerator.device)
    optimizer.register_step_post_hook(lambda *_: events.append("step"))
    model, arguments = network, ()
    if version == "data_parallel_step":
        model = torch.nn.DataParallel(network, device_ids=[])
    elif version == "ddp_step":
        model = torch.nn.parallel.DistributedDataParallel(network)
    elif version == "accelerate_step":
        model, optimizer = accelerator.prepare(network, optimizer)
        arguments = (accelerator,)
    for number in range(len(SIZES)):
        images, labels = make_batch(number, accelerator.process_index, accelerator.device)
        step(*arguments, model, optimizer, images, labels, MAX_NORM)
    return flatten(network.parameters())


def reference(mistake: str, rank: int, processes: int):
    """Train on one process with the gradients of all ranks, and return the weights of `rank`.

    `mistake` is a key of MISTAKES, or "" for correct training.
    """
    model, optimizer = model_and_optimizer("cpu")
    weights = list(model.parameters())
    for number in range(len(SIZES)):
        ranks = [rank] if mistake == "without the average" else range(processes)
        gradients = [gradients_of(model, number, each, mistake) for each in ranks]
        for weight, *by_rank in zip(weights, *gradients, strict=True):
            average = torch.stack(by_rank).mean(dim=0)
            has_old = mistake == "no reset" and weight.grad is not None
            weight.grad = weight.grad + average if has_old else average
        if mistake not in ("never", "before the average"):
            clip(weights, mistake, processes)
        if mistake != "no gradients":
            optimizer.step()
    return flatten(weights)


def gradients_of(model, number: int, rank: int, mistake: str) -> list:
    """Return the gradients of one rank's batch, before they are averaged over the ranks."""
    images, labels = make_batch(number, rank, "cpu")
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    if mistake != "before the average":
        return list(gradients)
    norm = torch.nn.utils.get_total_norm(gradients)
    return [gradient * min(1, MAX_NORM / norm) for gradient in gradients]


def clip(weights: list, mistake: str, processes: int) -> None:
    """Clip the gradients of `weights`, with the mistake if it affects clipping."""
    from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

    def multiply(factor) -> None:
        for weight in weights:
            weight.grad *= factor

    before = {"divide, clip": 1 / processes, "multiply, clip": processes}
    limits = {"divide max_norm": MAX_NORM / processes, "multiply max_norm": MAX_NORM * processes}
    after = {"clip, divide": 1 / processes, "clip, multiply": processes}
    if mistake == "each value":
        clip_grad_value_(weights, MAX_NORM)
    elif mistake == "each weight":
        for weight in weights:
            clip_grad_norm_(weight, MAX_NORM)
    elif mistake == "scale":
        multiply(MAX_NORM / get_total_norm([weight.grad for weight in weights]))
    else:
        multiply(before.get(mistake, 1))
        clip_grad_norm_(weights, limits.get(mistake, MAX_NORM))
        multiply(after.get(mistake, 1))


def model_and_optimizer(device) -> tuple:
    """Return a small model with the same weights on every process, and its optimizer."""
    nn = torch.nn
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5)).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def make_batch(number: int, rank: int, device) -> tuple:
    """Return the images and labels of one rank for one optimizer step."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    images = SIZES[number] * torch.randn(BATCH, 1, 4, 4, generator=generator)
    labels = torch.randint(0, 5, (BATCH,), generator=generator)
    return images.to(device), labels.to(device)


if __name__ == "__main__":
    sys.exit(grade(__file__, __doc__, observe, right=RIGHT, group_sizes=(1, 2)))
