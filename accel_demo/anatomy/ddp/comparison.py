"""Average gradients in several ways, and check which ways give the same weights as DDP."""

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
from torch.nn.utils import parameters_to_vector

from accel_demo.anatomy.ddp.by_hand import HandmadeDDP, average_each, average_flat
from accel_demo.anatomy.ring import all_reduce_chunked_ring
from accel_demo.anatomy.wire import Wire
from accel_demo.processes.connect import gather_objects
from accel_demo.processes.devices import use_cpu
from accel_demo.processes.environment import is_launched
from accel_demo.processes.group import PRELOADED, run_in_group
from accel_demo.show import table
from accel_demo.wording import counted

STEPS, BATCH_SIZE, LEARNING_RATE = 4, 8, 0.3
SMALL_BUCKET_MIB = 0.004
REFERENCE = "DistributedDataParallel, run again"
SMALL_REFERENCE = "DistributedDataParallel, small buckets"
SMALL_BY_HAND = "rebuilt by hand, small buckets (compared with the row above)"


def print_comparison() -> None:
    """Compare all methods on 2, 3 and 4 processes, or on the processes of an existing launch."""
    with tempfile.TemporaryDirectory() as folder:
        for processes in [2] if is_launched() else [2, 3, 4]:
            run_in_group(compare, processes, Path(folder), preloaded=(*PRELOADED, "accelerate"))
        files = sorted(Path(folder).glob("*.json"), key=lambda file: int(file.stem))
        columns = {int(file.stem): json.loads(file.read_text(encoding="utf-8")) for file in files}
    if not columns:  # in a launch, only rank 0 writes files
        return
    results = {True: "equal", False: "different"}
    rows = [[name, *(results[column[name]] for column in columns.values())] for name in METHODS]
    head = f"{STEPS} steps, and the weights compared with DDP's"
    print(table([head, *(counted(processes, "process") for processes in columns)], rows))


def compare(device: torch.device, folder: Path) -> None:
    """Train with each method. Rank 0 saves which methods end with the same weights as DDP."""
    # DDP trains again for its row in the table, which shows whether DDP is reproducible.
    usual, small = (METHODS[name](device) for name in (REFERENCE, SMALL_REFERENCE))
    is_equal = {
        name: torch.equal(train(device), small if name == SMALL_BY_HAND else usual)
        for name, train in METHODS.items()
    }
    if any(other != is_equal for other in gather_objects(is_equal)):
        raise RuntimeError("the ranks do not agree on which weights are equal")
    if dist.get_rank() == 0:
        (folder / f"{dist.get_world_size()}.json").write_text(
            json.dumps(is_equal), encoding="utf-8"
        )


def make_model(device: torch.device) -> nn.Module:
    """Return a model with the same 7,110 weights on all ranks."""
    torch.manual_seed(0)
    layers = nn.Linear(29, 67), nn.Tanh(), nn.Linear(67, 67), nn.Tanh(), nn.Linear(67, 8)
    return nn.Sequential(*layers).to(device)


def make_batch(step: int, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and labels of one rank in one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(BATCH_SIZE, 29, generator=generator)
    labels = torch.randint(0, 8, (BATCH_SIZE,), generator=generator)
    return inputs.to(device), labels.to(device)


def train_with(
    device, wrap=lambda model: model, share: Callable | None = None, backward=torch.Tensor.backward
) -> torch.Tensor:
    """Train on this rank's batches, and return all weights as one vector.

    `wrap(model)` returns the module to call, `backward(loss)` computes the gradients, and
    `share(parameters, step)` averages them. `share` is None if the wrapped module averages them.
    """
    model = make_model(device)
    wrapped = wrap(model)
    for step in range(STEPS):
        inputs, labels = make_batch(step, dist.get_rank(), device)
        backward(F.cross_entropy(wrapped(inputs), labels))
        if share:
            share(list(model.parameters()), step)
        descend(model)
    return parameters_to_vector(model.parameters()).detach()


def train_whole_batch(device) -> torch.Tensor:
    """Train in one process, with the batches of all ranks joined into one batch."""
    model = make_model(device)
    for step in range(STEPS):
        batches = [make_batch(step, rank, device) for rank in range(dist.get_world_size())]
        inputs, labels = map(torch.cat, zip(*batches, strict=True))
        F.cross_entropy(model(inputs), labels).backward()
        descend(model)
    return parameters_to_vector(model.parameters()).detach()


def train_every_rank(device) -> torch.Tensor:
    """Train in one process, accumulating gradients over the batches of all ranks."""
    model, world_size = make_model(device), dist.get_world_size()
    for step in range(STEPS):
        for rank in range(world_size):
            inputs, labels = make_batch(step, rank, device)
            (F.cross_entropy(model(inputs), labels) * (1 / world_size)).backward()
        descend(model)
    return parameters_to_vector(model.parameters()).detach()


def average_in_a_ring(parameters, step: int) -> None:
    """Average the gradients with the chunked ring of page 21 instead of `dist.all_reduce`."""

    def all_reduce(flat: torch.Tensor) -> None:
        all_reduce_chunked_ring(flat, Wire())

    average_flat(parameters, multiply=True, reverse=step > 0, all_reduce=all_reduce)


def ddp_with_a_hook(model: nn.Module) -> nn.Module:
    """Wrap the model in DDP with PyTorch's `allreduce_hook`, which divides by N before the sum."""
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, allreduce_hook)
    return ddp


def train_with_accelerate(device) -> torch.Tensor:
    """Train with Accelerate, which wraps the model in `DistributedDataParallel`."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=use_cpu())
    if accelerator.num_processes != dist.get_world_size():
        raise RuntimeError(f"Accelerate has connected {accelerator.num_processes} processes")
    return train_with(device, wrap=accelerator.prepare, backward=accelerator.backward)


@torch.no_grad()
def descend(model: nn.Module) -> None:
    """Perform one step of plain gradient descent, and set the gradients to None."""
    for parameter in model.parameters():
        parameter -= LEARNING_RATE * cast(torch.Tensor, parameter.grad)
        parameter.grad = None


def _flat(multiply: bool, reversed_from: int) -> Callable:
    """Return a function that calls `average_flat`, in reverse from step `reversed_from` on."""
    return lambda parameters, step: average_flat(parameters, multiply, step >= reversed_from)


METHODS = {  # the rows of the table; all methods start with the same weights
    "one process, all ranks' samples in one batch": train_whole_batch,
    "one process, the ranks' batches one after another": train_every_rank,
    "one all-reduce per parameter, then divide by N": partial(
        train_with, share=lambda parameters, step: average_each(parameters)
    ),
    "one flat buffer, then divide by N": partial(train_with, share=_flat(False, STEPS)),
    "one flat buffer, times 1/N first": partial(train_with, share=_flat(True, STEPS)),
    "times 1/N first, in reverse order in every step": partial(train_with, share=_flat(True, 0)),
    "times 1/N first, in reverse order from step 2 on": partial(train_with, share=_flat(True, 1)),
    "in reverse order from step 2 on, then divide by N": partial(train_with, share=_flat(False, 1)),
    "times 1/N first, reverse from step 2, our ring": partial(train_with, share=average_in_a_ring),
    "rebuilt by hand, with buckets and hooks": partial(train_with, wrap=HandmadeDDP),
    REFERENCE: partial(train_with, wrap=DistributedDataParallel),
    "Accelerate": train_with_accelerate,
    "DistributedDataParallel with `allreduce_hook`": partial(train_with, wrap=ddp_with_a_hook),
    SMALL_REFERENCE: partial(
        train_with, wrap=partial(DistributedDataParallel, bucket_cap_mb=SMALL_BUCKET_MIB)
    ),
    SMALL_BY_HAND: partial(train_with, wrap=partial(HandmadeDDP, bucket_mib=SMALL_BUCKET_MIB)),
}
