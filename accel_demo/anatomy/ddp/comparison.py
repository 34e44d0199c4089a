"""The same training told in many ways, and which of them end with the bits of DDP.

`python -m accel_demo.anatomy.ddp` prints it.
"""

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from accel_demo.anatomy.ddp.by_hand import HandmadeDDP, average_each, average_flat
from accel_demo.processes.connect import gather_objects, use_cpu
from accel_demo.processes.environment import is_launched
from accel_demo.processes.group import PRELOADED, run_in_group
from accel_demo.show import table
from accel_demo.wording import counted

STEPS, BATCH_SIZE, LEARNING_RATE = 4, 8, 0.3
SMALL_BUCKET_MIB = 0.004
REFERENCE = "DistributedDataParallel, once more"
SMALL_REFERENCE = "DistributedDataParallel, small buckets"
SMALL_BY_HAND = "by hand, small buckets (compared with the row above)"


def ladder(device: torch.device, folder: Path) -> None:
    """One process of a group: train in each way, and write down which ended like DDP."""
    # Runs of their own: so DDP's row tells whether DDP repeats itself.
    usual, small = (TELLINGS[name](device) for name in (REFERENCE, SMALL_REFERENCE))
    marks = {}
    for name, train in TELLINGS.items():
        marks[name] = torch.equal(train(device), small if name == SMALL_BY_HAND else usual)
    everyone = gather_objects(marks)
    if any(other != marks for other in everyone):
        raise RuntimeError(f"the ranks do not agree: {everyone}")
    if dist.get_rank() == 0:
        (folder / f"{dist.get_world_size()}.json").write_text(json.dumps(marks))


def print_ladder(numbers: tuple[int, ...] = (2, 3, 4)) -> None:
    """Climb the ladder with each number of processes, and print the table.

    Within a launcher, that launch's number is the only one.
    """
    with tempfile.TemporaryDirectory() as folder:
        for processes in numbers[:1] if is_launched() else numbers:
            preloaded = (*PRELOADED, "accelerate")
            run_in_group(ladder, processes, Path(folder), preloaded=preloaded)
        files = sorted(Path(folder).glob("*.json"), key=lambda file: int(file.stem))
        columns = {int(file.stem): json.loads(file.read_text()) for file in files}
    if not columns:  # not rank 0 of its launch
        return
    rows = []
    for name in TELLINGS:
        marks = ["equal" if column[name] else "different" for column in columns.values()]
        rows.append([name, *marks])
    head = [f"{STEPS} steps, and the weights compared with DDP's"]
    print(table([*head, *(counted(processes, "process") for processes in columns)], rows))


def make_model(device: torch.device) -> nn.Module:
    """A net of 7 110 weights, the same for everyone."""
    torch.manual_seed(0)
    layers = nn.Linear(29, 67), nn.Tanh(), nn.Linear(67, 67), nn.Tanh(), nn.Linear(67, 8)
    return nn.Sequential(*layers).to(device)


def make_batch(step: int, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs and labels of one rank in one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(BATCH_SIZE, 29, generator=generator)
    labels = torch.randint(0, 8, (BATCH_SIZE,), generator=generator)
    return inputs.to(device), labels.to(device)


def train_with(device, wrap: Callable | None = None, share: Callable | None = None):
    """Train on this rank's batches; gives all weights in one tensor.

    `wrap(model)` gives the module to call, `share(parameters, step)` averages after each backward.
    """
    model = make_model(device)
    wrapped = wrap(model) if wrap else model
    for step in range(STEPS):
        inputs, labels = make_batch(step, dist.get_rank(), device)
        F.cross_entropy(wrapped(inputs), labels).backward()
        if share:
            share(list(model.parameters()), step)
        descend(model)
    return flatten(model)


def train_whole_batch(device):
    """One process that has the batches of all ranks in one."""
    model = make_model(device)
    for step in range(STEPS):
        batches = [make_batch(step, rank, device) for rank in range(dist.get_world_size())]
        inputs, labels = map(torch.cat, zip(*batches, strict=True))
        F.cross_entropy(model(inputs), labels).backward()
        descend(model)
    return flatten(model)


def train_every_rank(device):
    """One process that plays all ranks in turn, and adds their shares up by rank."""
    model, world_size = make_model(device), dist.get_world_size()
    for step in range(STEPS):
        for rank in range(world_size):
            inputs, labels = make_batch(step, rank, device)
            (F.cross_entropy(model(inputs), labels) * (1 / world_size)).backward()
        descend(model)
    return flatten(model)


def average_in_a_ring(parameters, step: int) -> None:
    """As a ring adds: the buffer in N chunks, each begun by another rank. (Page 05 sends it.)"""
    world_size = dist.get_world_size()
    ordered = parameters[::-1] if step > 0 else parameters
    flat = torch.cat([parameter.grad.flatten() for parameter in ordered]) * (1 / world_size)
    gathered = [torch.empty_like(flat) for _ in range(world_size)]
    dist.all_gather(gathered, flat)
    chunks = [one.chunk(world_size) for one in gathered]
    sums = []
    for chunk in range(len(chunks[0])):
        total = chunks[chunk][chunk].clone()
        for hop in range(1, world_size):
            total += chunks[(chunk + hop) % world_size][chunk]
        sums.append(total)
    parts = torch.cat(sums).split([parameter.numel() for parameter in ordered])
    for parameter, part in zip(ordered, parts, strict=True):
        parameter.grad.copy_(part.view_as(parameter))


def ddp_with_a_hook(model: nn.Module) -> nn.Module:
    """With PyTorch's own hook for an all-reduce, which divides before where DDP multiplies."""
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, allreduce_hook)
    return ddp


def train_with_accelerate(device):
    """Accelerate wraps the model in `DistributedDataParallel`."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=use_cpu())
    if accelerator.num_processes != dist.get_world_size():
        raise RuntimeError(f"Accelerate has connected {accelerator.num_processes} processes")
    model = make_model(device)
    wrapped = accelerator.prepare(model)
    for step in range(STEPS):
        inputs, labels = make_batch(step, dist.get_rank(), device)
        accelerator.backward(F.cross_entropy(wrapped(inputs), labels))
        descend(model)
    return flatten(model)


@torch.no_grad()
def descend(model: nn.Module) -> None:
    """One step of plain gradient descent."""
    for parameter in model.parameters():
        parameter -= LEARNING_RATE * cast(torch.Tensor, parameter.grad)
        parameter.grad = None


def flatten(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _flat(multiply: bool, reversed_from: int) -> Callable:
    """`average_flat`, with the last parameter first from this step on."""
    return lambda parameters, step: average_flat(parameters, multiply, step >= reversed_from)


TELLINGS = {  # how the row of each begins; every one trains from the same weights
    "one process, the batches of all ranks in one": train_whole_batch,
    "one process, the ranks' batches in turn": train_every_rank,
    "one all-reduce per parameter, then divide by N": partial(
        train_with, share=lambda parameters, step: average_each(parameters)
    ),
    "one flat buffer, then divide by N": partial(train_with, share=_flat(False, STEPS)),
    "one flat buffer, times 1/N before": partial(train_with, share=_flat(True, STEPS)),
    "the same, in reverse order": partial(train_with, share=_flat(True, 0)),
    "the same, in reverse order from step 2 on": partial(train_with, share=_flat(True, 1)),
    "the same, but divided by N in the end": partial(train_with, share=_flat(False, 1)),
    "the same, times 1/N, but added around a ring": partial(train_with, share=average_in_a_ring),
    "by hand: buckets that hooks fill and send": partial(train_with, wrap=HandmadeDDP),
    REFERENCE: partial(train_with, wrap=DistributedDataParallel),
    "Accelerate": train_with_accelerate,
    "DistributedDataParallel with `allreduce_hook`": partial(train_with, wrap=ddp_with_a_hook),
    SMALL_REFERENCE: partial(
        train_with, wrap=partial(DistributedDataParallel, bucket_cap_mb=SMALL_BUCKET_MIB)
    ),
    SMALL_BY_HAND: partial(train_with, wrap=partial(HandmadeDDP, bucket_mib=SMALL_BUCKET_MIB)),
}
