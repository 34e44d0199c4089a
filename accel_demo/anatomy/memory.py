"""Bytes that a training step holds on each device, under six strategies, counted on real tensors.

python -m accel_demo.anatomy.memory --processes 2 --model small_cnn --optimizer adamw
"""

import gc
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from accel_demo.anatomy.data_parallel.phases import DataParallel
from accel_demo.anatomy.flags import command_line, read
from accel_demo.config import MODELS, TrainConfig
from accel_demo.errors import UserError, one_line_errors
from accel_demo.models import CLASSES, make_model
from accel_demo.processes.connect import gather_objects
from accel_demo.processes.group import run_in_group
from accel_demo.show import COLOURS, new_figure, save, table

KINDS = ["parameters", "gradients", "optimizer state", "buckets", "gathered"]
OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "sgd": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
}
GLOBAL_BATCH = 24  # images, which 1, 2, 3, 4, 6 or 8 devices can share
Bytes = dict[str, int]


def count_all(device: torch.device, model: str, optimizer: str) -> dict[str, list[Bytes]]:
    """For each strategy, and each device under it, the bytes of each kind and what stays.

    Counted in the second step, when its gradients are there; "stays" is what is left once
    `zero_grad` has been called. Activations, BatchNorm's buffers and single numbers, like an
    optimizer's count of steps, are left out. "gathered" is there for a part of the step only. On
    GPUs "peak" is what CUDA has measured, activations too. Every rank has to call this. Raises
    ValueError for a name that is not known, or processes that cannot share the batch.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    check(model, optimizer, world_size)
    setup, found = (model, OPTIMIZERS[optimizer]), {}
    if rank == 0:  # which need no other process
        devices = devices_of_a_process(device, world_size)
        found["one process"] = measured(one_process, [device], *setup)
        found["nn.DataParallel"] = measured(data_parallel, devices, *setup)
    dist.barrier()
    found["DDP"] = measured(ddp, [device], *setup)
    found["DDP, gradients as bucket views"] = measured(ddp, [device], *setup, views=True)
    found["the same, ZeRO optimizer"] = measured(ddp, [device], *setup, views=True, zero=True)
    found["FSDP2"] = measured(fsdp, [device], *setup)
    everyone = gather_objects(found)
    return {way: [one for found in everyone for one in found.get(way, [])] for way in everyone[0]}


def devices_of_a_process(device: torch.device, processes: int) -> list[torch.device]:
    """As many as there are processes; of GPUs no more than this machine has."""
    if device.type == "cpu":
        return [device] * processes
    count = min(processes, torch.accelerator.device_count())
    return [torch.device(device.type, index) for index in range(count)]


def one_process(devices: list, model: str, make_optimizer: Callable) -> list[Bytes]:
    """Nothing is split: the whole batch, and all of the bytes, are on one device."""
    network = make_network(model, devices[0])
    optimizer = make_optimizer(network.parameters())
    train(network, optimizer, *batch(devices[0]))
    return [held(network, optimizer)]


def data_parallel(devices: list, model: str, make_optimizer: Callable) -> list[Bytes]:
    """The first device keeps everything; a replica is on each of the others within a step.

    What a replica holds is read from the record of our own DataParallel, which runs on a CPU too.
    In PyTorch's own all of its gradients wait there to be added up on the first device together.
    Source: Broadcast.backward in torch/nn/parallel/_functions.py
    """
    network, record = make_network(model, devices[0]), []
    optimizer = make_optimizer(network.parameters())
    images, labels = batch(devices[0])
    wrapped = DataParallel(network, devices, record)
    output = train(wrapped, optimizer, images, labels, before_step=record.clear)
    found = [held(network, optimizer, gathered=bytes_of([output]))]
    for replica in range(1, len(devices)):
        moved = dict.fromkeys(("replicate", "backward"), 0)
        for event in record:
            if event.replica == replica and event.phase in moved:
                moved[event.phase] += event.size
        buffers = bytes_of(network.buffers())  # copied too, but not counted anywhere here
        moments = [moved["replicate"] - buffers, moved["backward"], 0, 0, 0, 0]
        found.append(dict(zip([*KINDS, "stays"], moments, strict=True)))
    if devices[0].type == "cuda":  # for the peak: PyTorch's own
        _start_peaks(devices)
        train(nn.DataParallel(network, devices), optimizer, images, labels)
    return found


def ddp(
    devices: list, model: str, make_optimizer: Callable, views: bool = False, zero: bool = False
) -> list[Bytes]:
    """All of everything on every rank, and buckets: one more copy of the gradients.

    With `views` the gradients lie in the buckets. With `zero` each rank's optimizer keeps the
    state of a share of the parameters: ZeRO stage 1, https://arxiv.org/abs/1910.02054
    """
    network, buckets = make_network(model, devices[0]), []
    wrapped = DistributedDataParallel(network, gradient_as_bucket_view=views)

    def see_bucket(group, bucket: dist.GradBucket):
        buckets.append(bucket.buffer())
        return allreduce_hook(group, bucket)  # what DDP does without a hook

    wrapped.register_comm_hook(None, see_bucket)
    optimizer = make_optimizer(network.parameters())
    if zero:  # imported here, because in torch 2.11 the import warns
        from torch.distributed.optim import ZeroRedundancyOptimizer

        kind, options = make_optimizer.func, make_optimizer.keywords
        optimizer = ZeroRedundancyOptimizer(network.parameters(), kind, **options)
    train(wrapped, optimizer, *_share(devices[0]), before_step=buckets.clear)
    return [held(network, optimizer, buckets)]


def fsdp(devices: list, model: str, make_optimizer: Callable) -> list[Bytes]:
    """A share of everything on each rank, and a layer's parameters while they are gathered.

    Counted is the largest layer, in forward. In backward the next one may be beside it already.
    """
    network, gathered = make_network(model, devices[0]), [0]
    mesh = init_device_mesh(devices[0].type, (dist.get_world_size(),))
    layers = [layer for layer in network.modules() if [*layer.parameters(recurse=False)]]
    for layer in layers:
        fully_shard(layer, mesh=mesh)
        layer.register_forward_pre_hook(  # called after FSDP's own, which gathers
            lambda layer, _: gathered.append(bytes_of(layer.parameters(recurse=False)))
        )
    fully_shard(network, mesh=mesh)
    optimizer = make_optimizer(network.parameters())
    images, labels = _share(devices[0])
    train(network, optimizer, images, labels)
    return [held(network, optimizer, gathered=max(gathered))]


def train(wrapped, optimizer, images, labels, before_step: Callable = list) -> torch.Tensor:
    """Two steps, the second with its gradients left in place. Gives its output."""
    for _ in range(2):  # DDP makes its final buckets after the first
        optimizer.zero_grad()
        before_step()
        output = wrapped(images)
        F.cross_entropy(output, labels).backward()
        optimizer.step()
    return output


def held(network: nn.Module, optimizer, buckets: Iterable = (), gathered: int = 0) -> Bytes:
    """The bytes of each kind that are here. A piece of memory is counted once, where it is first.

    Calls `zero_grad`, and counts what stays.
    """
    state = [
        value
        for values in getattr(optimizer, "optim", optimizer).state.values()  # of ZeRO's own part
        for value in values.values()
        if torch.is_tensor(value) and value.dim() > 0
    ]
    parameters = [parameter.detach() for parameter in network.parameters()]
    gradients = [parameter.grad for parameter in network.parameters()]
    counted = set()
    tensors = (parameters, gradients, state, buckets)
    sizes = [*(bytes_of(some, counted) for some in tensors), gathered]
    optimizer.zero_grad()
    stays = bytes_of([*parameters, *state, *buckets])  # DDP keeps its buckets
    return {**dict(zip(KINDS, sizes, strict=True)), "stays": stays}


def bytes_of(tensors: Iterable[torch.Tensor], counted: set | None = None) -> int:
    """The bytes of memory these tensors lie in on this rank, without what is `counted` already."""
    counted, total = set() if counted is None else counted, 0
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def make_network(model: str, device: torch.device) -> nn.Module:
    """The network, in the usual memory format: FSDP2 takes no other."""
    network = make_model(TrainConfig(model=model))
    return network.to(device=device, memory_format=torch.contiguous_format)  # pyright: ignore


def batch(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Images that look like nothing, and labels."""
    images = torch.linspace(-1, 1, GLOBAL_BATCH * 28 * 28, device=device)
    return images.view(-1, 1, 28, 28).sin(), torch.arange(GLOBAL_BATCH, device=device) % CLASSES


def check(model: str, optimizer: str, processes: int) -> None:
    """Raises ValueError for what cannot be counted."""
    for name, value, known in (("model", model, MODELS), ("optimizer", optimizer, OPTIMIZERS)):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    if processes < 1 or GLOBAL_BATCH % processes:
        raise ValueError(f"processes must divide {GLOBAL_BATCH} images, got {processes}")


def measured(strategy: Callable, devices: list, *arguments, **options) -> list[Bytes]:
    """What a strategy counts on each of these devices, and on GPUs the peak beside it."""
    gc.collect()  # what the strategy before this one has left behind
    on_gpus = devices[0].type == "cuda"
    if on_gpus:
        _start_peaks(devices)
    found = strategy(devices, *arguments, **options)
    for one, device in zip(found, devices, strict=True):
        if on_gpus:
            one["peak"] = torch.cuda.max_memory_allocated(device)
    return found


def _start_peaks(devices: list) -> None:
    for device in devices:
        torch.zeros(1, device=device)  # a GPU this process has not used yet knows no peak
        torch.cuda.reset_peak_memory_stats(device)


def _share(device: torch.device) -> list[torch.Tensor]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return [tensor.chunk(world_size)[rank] for tensor in batch(device)]


def main() -> None:
    """What `python -m accel_demo.anatomy.memory` does."""
    parser = command_line(__doc__, processes=2)
    parser.add_argument("--model", choices=MODELS, default="small_cnn", help="default: small_cnn")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="default: adamw")
    options = read(parser)
    try:
        check(options.model, options.optimizer, options.processes)
    except ValueError as error:
        raise UserError(f"--{error}") from None
    run_in_group(show, options.processes, options)


def show(device: torch.device, options) -> None:
    """Count everything; rank 0 prints and draws."""
    found = count_all(device, options.model, options.optimizer)
    if dist.get_rank() > 0:
        return
    print(f"Bytes held in a step, {options.model} with {options.optimizer}:\n")
    print(byte_table(found))
    if options.plot:
        draw(found, options)


def byte_table(found: dict[str, list[Bytes]]) -> str:
    """One row for each device under each strategy."""
    kinds = [*KINDS, "together", "stays"]
    if "peak" in found["one process"][0]:
        kinds.append("peak")
    rows = []
    for way, devices in found.items():
        for index, sizes in enumerate(devices):
            sizes = {**sizes, "together": together(sizes)}
            rows.append([way, f"{noun(way)} {index}", *(sizes[kind] for kind in kinds)])
    return table(["strategy", "where", *kinds], rows)


def together(sizes: Bytes) -> int:
    """All kinds of one device. Not all of it need be there at the same moment."""
    return sum(sizes[kind] for kind in KINDS)


def noun(way: str) -> str:
    """What has the memory: DataParallel has devices in one process, each other way has ranks."""
    return "device" if way == "nn.DataParallel" else "rank"


def draw(found: dict[str, list[Bytes]], options) -> None:
    """A bar for each device, its kinds stacked, as multiples of the bytes of all parameters."""
    figure = new_figure(10, 5)
    axes = figure.subplots()
    unit = found["one process"][0]["parameters"]
    positions, labels, x = [], [], 0.0
    centred = {"ha": "center", "va": "top", "fontsize": 9}
    for way, devices in found.items():
        start = x
        for index, sizes in enumerate(devices):
            low = 0.0
            for kind, colour in zip(KINDS, COLOURS, strict=False):
                high = sizes[kind] / unit
                bar = {"color": colour, "edgecolor": "white", "label": kind if x == 0 else None}
                axes.bar(x, high, 0.8, low, **bar)
                low += high
            mark = {
                "color": "black",
                "linewidth": 2.5,
                "label": "stays after zero_grad" if x == 0 else None,
            }
            axes.plot([x - 0.45, x + 0.45], [sizes["stays"] / unit] * 2, **mark)
            positions.append(x)
            labels.append(index)
            x += 1
        name = way.replace(", ", ",\n").replace("gradients as ", "gradients as\n")
        middle, below = ((start + x - 1) / 2, -0.09), axes.get_xaxis_transform()
        axes.annotate(f"{noun(way)}\n\n{name}", middle, (0, 0), below, "offset points", **centred)
        x += 0.7
    axes.set_xticks(positions, labels, fontsize=8)
    axes.set_ylabel("bytes, in multiples of all parameters")
    axes.set_title(f"What each device holds in a step: {options.model}, {options.optimizer}")
    axes.legend(ncols=6, fontsize=8, loc="upper center", frameon=False)
    axes.set_ylim(
        0, 1.15 * max(together(one) for devices in found.values() for one in devices) / unit
    )
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, Path(options.plot))


if __name__ == "__main__":
    with one_line_errors():
        main()
