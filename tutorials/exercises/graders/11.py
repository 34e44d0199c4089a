"""Grade exercise 11: train with each of the four functions, and check the final weights.

python tutorials/exercises/graders/11.py FILE
"""

import sys
from pathlib import Path

from accel_demo.lab.grading import Wrong, described, grade, import_answer

VERSIONS = ("plain_step", "data_parallel_step", "ddp_step", "accelerate_step")
STEPS, WINDOW, BATCH, MAX_NORM = 4, 2, 8, 0.1
TOLERANCE = 1e-6
RIGHT = "all four versions clip correctly, and end with the same weights, on one process and on two"


def observe(answer: Path, device) -> None:
    from accelerate import Accelerator

    from accel_demo.processes.connect import use_cpu

    accelerator = Accelerator(cpu=use_cpu(), gradient_accumulation_steps=WINDOW)
    module = import_answer(answer)
    for version in VERSIONS if accelerator.num_processes == 1 else VERSIONS[2:]:
        try:
            weights = train_with(getattr(module, version), version, accelerator)
        except (Exception, SystemExit) as error:
            raise Wrong(f"{version} fails with {described(error)}") from None
        judge(version, weights, accelerator.num_processes)


def judge(version: str, weights, processes: int) -> None:
    def distance(clip: str) -> float:
        return (weights - reference(clip, processes)).abs().max().item()

    if distance("window") <= TOLERANCE:
        return
    if distance("never") <= TOLERANCE:
        raise Wrong(
            f"{version} does not clip: its weights equal those of training without clipping"
        )
    if distance("every micro-batch") <= TOLERANCE:
        raise Wrong(
            f"{version} clips on every micro-batch: clip once per optimizer step, when the "
            "gradients of the whole window are complete"
        )
    raise Wrong(
        f"{version} ends with weights that differ from the expected weights by "
        f"up to {distance('window'):.1e}, but at most {TOLERANCE:.0e} is allowed"
    )


def train_with(step, version: str, accelerator):
    """Call the learner's function `STEPS` times, and return the weights as one vector."""
    import torch

    network, optimizer = model_and_optimizer()
    model, arguments = network, ()
    if version == "data_parallel_step":
        model = torch.nn.DataParallel(network, device_ids=[])
    elif version == "ddp_step":
        model = torch.nn.parallel.DistributedDataParallel(network)
    elif version == "accelerate_step":
        model, optimizer = accelerator.prepare(network, optimizer)
        arguments = (accelerator,)
    for number in range(STEPS):
        window = make_window(number, accelerator.process_index)
        step(*arguments, model, optimizer, window, MAX_NORM)
    return torch.nn.utils.parameters_to_vector(network.parameters()).detach()


def reference(clip: str, processes: int):
    """Train on one process with the mean of all ranks' gradients, and return the weights.

    `clip` is "never", "window" (once per window), or "every micro-batch" (a common mistake: each
    rank also clips its own gradients, before they are averaged).
    """
    import torch
    import torch.nn.functional as F

    model, optimizer = model_and_optimizer()
    weights = list(model.parameters())
    for number in range(STEPS):
        gradients_by_rank = []
        for rank in range(processes):
            optimizer.zero_grad()
            for index, (inputs, labels) in enumerate(make_window(number, rank)):
                (F.cross_entropy(model(inputs), labels) / WINDOW).backward()
                if clip == "every micro-batch" and index + 1 < WINDOW:
                    torch.nn.utils.clip_grad_norm_(weights, MAX_NORM)
            gradients_by_rank.append([weight.grad.clone() for weight in weights])
        for weight, *gradients in zip(weights, *gradients_by_rank, strict=True):
            weight.grad = torch.stack(gradients).mean(dim=0)
        if clip != "never":
            torch.nn.utils.clip_grad_norm_(weights, MAX_NORM)
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(weights).detach()


def model_and_optimizer() -> tuple:
    """Return a small model with the same weights on every process, and its optimizer."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 5))
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def make_window(number: int, rank: int) -> list:
    """Return the micro-batches of one rank for one optimizer step."""
    import torch

    generator = torch.Generator().manual_seed(100 * number + rank)
    inputs = torch.randn(WINDOW, BATCH, 12, generator=generator)
    labels = torch.randint(0, 5, (WINDOW, BATCH), generator=generator)
    return list(zip(inputs, labels, strict=True))


if __name__ == "__main__":
    sys.exit(grade(__file__, __doc__, observe, right=RIGHT, group_sizes=(1, 2)))
