"""Count the bytes that each device stores in a training step, under six strategies.

python -m accel_demo.anatomy.memory
python -m accel_demo.anatomy.memory --processes 3 --model tiny_cnn --optimizer sgd

The program counts real tensors after the second step, while its gradients still exist. It omits
activations, BatchNorm's buffers, and scalars such as an optimizer's step count. "gathered" tensors
exist only during a part of the step. "stays" is the number of bytes left after `zero_grad`. On
GPUs, "peak" is the peak that torch.cuda measured, including activations.
"""

import gc
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

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
from accel_demo.anatomy.data_parallel.scatter_gather import REPLICATE_BACKWARD
from accel_demo.config import IMAGE_MODELS, TrainConfig
from accel_demo.errors import UserError, one_line_errors
from accel_demo.models import CLASSES, make_model
from accel_demo.options import Parser
from accel_demo.processes.connect import gather_objects
from accel_demo.processes.group import run_in_group
from accel_demo.show import COLORS, new_figure, save, table

KINDS = ["parameters", "gradients", "optimizer state", "buckets", "gathered"]
OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "sgd": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
}
GLOBAL_BATCH = 24  # images; divisible by 1, 2, 3, 4, 6 and 8 devices


@dataclass
class DeviceMemory:
    """Bytes that one device stores in a training step."""

    by_kind: dict[str, int]  # the keys are `KINDS`
    stays: int  # bytes left after zero_grad
    peak: int | None = None  # measured by torch.cuda

    @property
    def total(self) -> int:
        """Bytes of all kinds together, even if they do not all exist at the same time."""
        return sum(self.by_kind.values())


def count_all(
    device: torch.device, model_name: str, optimizer: str
) -> dict[str, list[DeviceMemory]]:
    """Measure the memory of each device under each strategy. Every rank must call this."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    setup, here = (model_name, OPTIMIZERS[optimizer]), {}
    if rank == 0:  # these two strategies use only one process
        devices = devices_of_a_process(device, world_size)
        here["one process"] = measured(one_process, [device], *setup)
        here["nn.DataParallel"] = measured(data_parallel, devices, *setup)
    dist.barrier()
    here["DDP"] = measured(ddp, [device], *setup)
    here["DDP, gradients as bucket views"] = measured(ddp, [device], *setup, views=True)
    here["the same, ZeRO optimizer"] = measured(ddp, [device], *setup, views=True, zero=True)
    here["FSDP2"] = measured(fsdp, [device], *setup)
    by_rank = gather_objects(here)
    return {name: [memory for r in by_rank for memory in r.get(name, [])] for name in by_rank[0]}


def devices_of_a_process(device: torch.device, processes: int) -> list[torch.device]:
    """Return the devices for DataParallel: one per process, but only GPUs that this machine has."""
    if device.type == "cpu":
        return [device] * processes
    count = min(processes, torch.accelerator.device_count())
    return [torch.device(device.type, index) for index in range(count)]


def one_process(devices: list, model_name: str, make_optimizer: Callable) -> list[DeviceMemory]:
    """Train without splitting anything: the whole batch and all tensors are on one device."""
    model = make_contiguous_model(model_name, devices[0])
    optimizer = make_optimizer(model.parameters())
    train(model, optimizer, *batch(devices[0]))
    return [device_memory(model, optimizer)]


def data_parallel(devices: list, model_name: str, make_optimizer: Callable) -> list[DeviceMemory]:
    """Train with DataParallel. Device 0 stores everything, and the others store temporary replicas.

    The bytes of a replica come from the event record of our own DataParallel, which also runs on a
    CPU. As in PyTorch's DataParallel, the gradients of a replica stay on its device until device 0
    adds them up.
    Source: Broadcast.backward in torch/nn/parallel/_functions.py
    """
    model, record = make_contiguous_model(model_name, devices[0]), []
    optimizer = make_optimizer(model.parameters())
    images, labels = batch(devices[0])
    wrapped = DataParallel(model, devices, record)
    output = train(wrapped, optimizer, images, labels, before_step=record.clear)
    memories = [device_memory(model, optimizer, gathered=bytes_of([output]))]
    for replica in range(1, len(devices)):
        moved = dict.fromkeys(("replicate", REPLICATE_BACKWARD), 0)
        for event in record:
            if event.replica == replica and event.phase in moved:
                moved[event.phase] += event.size
        parameters = moved["replicate"] - bytes_of(model.buffers())  # buffers are omitted
        sizes = [parameters, moved[REPLICATE_BACKWARD], 0, 0, 0]
        memories.append(DeviceMemory(dict(zip(KINDS, sizes, strict=True)), stays=0))
    if devices[0].type == "cuda":  # measure the peak of PyTorch's own DataParallel
        _start_peaks(devices)
        train(nn.DataParallel(model, devices), optimizer, images, labels)
    return memories


def ddp(
    devices: list,
    model_name: str,
    make_optimizer: Callable,
    views: bool = False,
    zero: bool = False,
) -> list[DeviceMemory]:
    """Train with DDP. Every rank stores everything, plus a second copy of the gradients in buckets.

    If `views` is True, the gradients are views of the buckets, so there is no second copy. If
    `zero` is True, each rank's optimizer stores the state of only a part of the parameters (ZeRO
    stage 1, https://arxiv.org/abs/1910.02054).
    """
    model, buckets = make_contiguous_model(model_name, devices[0]), []
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=views)

    def see_bucket(group, bucket: dist.GradBucket):
        buckets.append(bucket.buffer())
        return allreduce_hook(group, bucket)  # what DDP does without a hook

    wrapped.register_comm_hook(None, see_bucket)
    optimizer = make_optimizer(model.parameters())
    if zero:  # imported here because the import prints a warning in torch 2.11
        from torch.distributed.optim import ZeroRedundancyOptimizer

        kind, options = make_optimizer.func, make_optimizer.keywords
        optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, **options)
    train(wrapped, optimizer, *_local_batch(devices[0]), before_step=buckets.clear)
    return [device_memory(model, optimizer, buckets)]


def fsdp(devices: list, model_name: str, make_optimizer: Callable) -> list[DeviceMemory]:
    """Train with FSDP2. Each rank stores a shard of everything, and gathers one layer at a time.

    The "gathered" bytes are those of the largest layer, as gathered in forward. Backward needs
    more: see tutorials/43_fsdp.py.
    """
    model, gathered = make_contiguous_model(model_name, devices[0]), [0]
    mesh = init_device_mesh(devices[0].type, (dist.get_world_size(),))
    layers = [layer for layer in model.modules() if [*layer.parameters(recurse=False)]]
    for layer in layers:
        fully_shard(layer, mesh=mesh)
        layer.register_forward_pre_hook(  # runs after FSDP's own hook, which gathers the layer
            lambda layer, _: gathered.append(bytes_of(layer.parameters(recurse=False)))
        )
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model.parameters())
    images, labels = _local_batch(devices[0])
    train(model, optimizer, images, labels)
    return [device_memory(model, optimizer, gathered=max(gathered))]


def train(wrapped, optimizer, images, labels, before_step: Callable = list) -> torch.Tensor:
    """Train for two steps, keep the gradients of the second step, and return its output."""
    for _ in range(2):  # DDP creates its final buckets after the first step
        optimizer.zero_grad()
        before_step()
        output = wrapped(images)
        F.cross_entropy(output, labels).backward()
        optimizer.step()
    return output


def device_memory(model, optimizer, buckets: Sequence = (), gathered=0) -> DeviceMemory:
    """Count the stored bytes, then call `zero_grad` and count the bytes that remain."""
    by_kind = held(model, optimizer, buckets, gathered)
    optimizer.zero_grad()
    stays = held(model, optimizer, buckets)  # includes the buckets, which DDP keeps
    return DeviceMemory(by_kind, sum(stays.values()))


def held(model: nn.Module, optimizer, buckets: Sequence = (), gathered=0) -> dict[str, int]:
    """Return the bytes of each kind. Memory shared by two kinds counts only for the first kind."""
    state = [
        value
        # ZeroRedundancyOptimizer keeps this rank's optimizer in `optim`.
        for values in getattr(optimizer, "optim", optimizer).state.values()
        for value in values.values()
        if torch.is_tensor(value) and value.dim() > 0
    ]
    parameters = [parameter.detach() for parameter in model.parameters()]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    counted: set = set()
    sizes = [bytes_of(tensors, counted) for tensors in (parameters, gradients, state, buckets)]
    return dict(zip(KINDS, [*sizes, gathered], strict=True))


def bytes_of(tensors: Iterable[torch.Tensor], counted: set | None = None) -> int:
    """Return the bytes of the tensors' storages on this rank, except storages in `counted`.

    This function adds the storages that it counts to `counted`.
    """
    counted, total = set() if counted is None else counted, 0
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def make_contiguous_model(model_name: str, device: torch.device) -> nn.Module:
    """Return a model in the contiguous memory format, the only format that FSDP2 supports."""
    model = make_model(TrainConfig(model=model_name))
    return model.to(device=device, memory_format=torch.contiguous_format)  # pyright: ignore


def batch(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch of synthetic images and their labels."""
    images = torch.linspace(-1, 1, GLOBAL_BATCH * 28 * 28, device=device)
    return images.view(-1, 1, 28, 28).sin(), torch.arange(GLOBAL_BATCH, device=device) % CLASSES


def measured(strategy: Callable, devices: list, *arguments, **options) -> list[DeviceMemory]:
    """Run a strategy, and return the memory of each device. On GPUs, include the peak."""
    gc.collect()  # free the tensors of the previous strategy
    on_gpus = devices[0].type == "cuda"
    if on_gpus:
        _start_peaks(devices)
    memories = strategy(devices, *arguments, **options)
    for memory, device in zip(memories, devices, strict=True):
        if on_gpus:
            memory.peak = torch.cuda.max_memory_allocated(device)
    return memories


def _start_peaks(devices: list) -> None:
    for device in devices:
        torch.zeros(1, device=device)  # a GPU has no peak until this process has used it
        torch.cuda.reset_peak_memory_stats(device)


def _local_batch(device: torch.device) -> list[torch.Tensor]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return [tensor.chunk(world_size)[rank] for tensor in batch(device)]


def main() -> None:
    parser = Parser(__doc__, plot=True, processes=2)
    parser.add_option("--model", "small_cnn", "the model", choices=IMAGE_MODELS)
    parser.add_option("--optimizer", "adamw", "the optimizer", choices=OPTIMIZERS)
    options = parser.parse_args()
    if GLOBAL_BATCH % options.processes:
        processes = options.processes
        raise UserError(f"--processes must divide the batch of {GLOBAL_BATCH}, got {processes}")
    run_in_group(show, options.processes, options)


def show(device: torch.device, options) -> None:
    memories = count_all(device, options.model, options.optimizer)
    if dist.get_rank() > 0:
        return
    print(f"Bytes held in a step, {options.model} with {options.optimizer}:\n")
    print(byte_table(memories))
    if options.plot:
        draw(memories, options)


def byte_table(memories: dict[str, list[DeviceMemory]]) -> str:
    """Return a table with a row for each device under each strategy."""
    head, rows = ["strategy", "where", *KINDS, "total", "stays"], []
    has_peak = memories["one process"][0].peak is not None
    for strategy, devices in memories.items():
        for index, memory in enumerate(devices):
            row = [strategy, f"{place_of(strategy)} {index}", *memory.by_kind.values()]
            peak = [memory.peak] if has_peak else []
            rows.append([*row, memory.total, memory.stays, *peak])
    return table([*head, "peak"] if has_peak else head, rows)


def place_of(strategy: str) -> str:
    """Return "device" for nn.DataParallel, which runs in one process, and "rank" otherwise."""
    return "device" if strategy == "nn.DataParallel" else "rank"


def draw(memories: dict[str, list[DeviceMemory]], options) -> None:
    """Draw each device's bytes as a stacked bar, in multiples of the bytes of all parameters."""
    figure = new_figure(10, 5)
    axes = figure.subplots()
    unit = memories["one process"][0].by_kind["parameters"]
    parts = {name: [memory.by_kind for memory in devices] for name, devices in memories.items()}
    places = draw_stacked_bars(axes, parts, unit, COLORS, gap=0.7)
    centered = {"ha": "center", "va": "top", "fontsize": 9}
    for strategy, devices in memories.items():
        for place, memory in zip(places[strategy], devices, strict=True):
            label, stays = None if place else "stays after zero_grad", memory.stays / unit
            axes.plot([place - 0.45, place + 0.45], [stays] * 2, "k", linewidth=2.5, label=label)
        name = strategy.replace(", ", ",\n").replace("gradients as ", "gradients as\n")
        name = f"{place_of(strategy)}\n\n{name}"
        middle, below = (statistics.mean(places[strategy]), -0.09), axes.get_xaxis_transform()
        axes.annotate(name, middle, (0, 0), below, "offset points", **centered)
    labels = [str(index) for devices in memories.values() for index in range(len(devices))]
    axes.set_xticks(sum(places.values(), []), labels, fontsize=8)
    axes.set_ylabel("bytes, in multiples of all parameters")
    axes.set_title(f"What each device holds in a step: {options.model}, {options.optimizer}")
    axes.legend(ncols=6, fontsize=8, loc="upper center", frameon=False)
    highest = max(memory.total for devices in memories.values() for memory in devices)
    axes.set_ylim(0, 1.15 * highest / unit)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, options.plot)


def draw_stacked_bars(
    axes, groups: dict[str, list[dict[str, int]]], unit: int, colors: list[str], gap: float
) -> dict[str, list[float]]:
    """Draw the bytes of each device as a stacked bar, and return the places of each group's bars.

    `groups` maps a strategy to {part: bytes} of each device. One unit of height is `unit` bytes.
    """
    places, place = {}, 0.0
    for name, devices in groups.items():
        places[name] = [place + index for index in range(len(devices))]
        for x, parts in zip(places[name], devices, strict=True):
            low = 0.0
            for (part, size), color in zip(parts.items(), colors, strict=False):
                label = None if x else part  # each part is in the legend once
                axes.bar(x, size / unit, 0.8, low, color=color, edgecolor="white", label=label)
                low += size / unit
        place += len(devices) + gap
    return places


if __name__ == "__main__":
    with one_line_errors():
        main()
