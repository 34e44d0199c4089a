"""Count the live tensors of a training step, and measure the memory of the process or GPUs."""

import ctypes
import gc
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from accel_demo.anatomy.data_parallel import phases
from accel_demo.anatomy.memory import (
    OPTIMIZERS,
    bytes_of,
    devices_of_a_process,
    held,
    make_contiguous_model,
)
from accel_demo.lab.memory.formula import KINDS, Bytes
from accel_demo.models import CLASSES
from accel_demo.observer.memory import return_freed_memory

# Number of steps; the last one's tensors are counted. DDP needs two, because it creates its final
# buckets at the start of the second. The other strategies allocate the same tensors in every step.
STEPS_TO_COUNT = {"nn.DataParallel": 1, "DDP": 2, "FSDP2": 1}


@dataclass(frozen=True)
class ProcessMemory:
    """Memory that one process uses in a training step.

    `measured` has one item for each GPU, or a single item for all CPU devices together.
    """

    connected_processes: int
    device: str  # "cpu" or "cuda"
    counted: Bytes  # sum over all devices of the process
    measured: list[Bytes]


def measure_each(
    device: torch.device, strategies: list[str], *choices: Any
) -> dict[str, ProcessMemory]:
    """Call `measure` for each strategy."""
    return {strategy: measure(device, strategy, *choices) for strategy in strategies}


def measure(
    device: torch.device,
    strategy: str,
    model_name: str,
    optimizer: str,
    replicas: int,
    batch_size: int,
) -> ProcessMemory:
    """Train twice in this process: once to count tensors, once to measure memory.

    The first run also loads libraries, allocates their scratch memory and opens connections. That
    memory is never freed, so the second run does not measure it again. All ranks must call this
    function. nn.DataParallel uses `replicas` devices in one process and needs no process group.
    """
    return_freed_memory()
    is_data_parallel = strategy == "nn.DataParallel"
    devices = devices_of_a_process(device, replicas) if is_data_parallel else [device]
    images, labels = batch(batch_size * len(devices), device)
    arguments = (strategy, model_name, OPTIMIZERS[optimizer], devices, images, labels)
    counted = count_tensors(*arguments)
    if is_data_parallel:
        # Saved-tensor hooks do not run in the replicas' threads, so this count is incomplete.
        del counted["activations"]
    gc.collect()
    connected = dist.get_world_size() if dist.is_initialized() else 1
    return ProcessMemory(connected, device.type, counted, measure_growth(*arguments))


def count_tensors(
    strategy: str, model_name: str, make_optimizer: Callable, devices: list, images, labels
) -> Bytes:
    """Train for `STEPS_TO_COUNT` steps, and count the bytes of the live tensors in the last step.

    Activations are the tensors that autograd saves for backward, except those that already existed
    before forward.
    Source: https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.saved_tensors_hooks
    """
    buckets, copies, saved = [], [0], []
    watch = Watch(
        before_copies=lambda: None,
        after_copies=lambda tensors: copies.append(bytes_of(tensors)),
        bucket=buckets.append,
    )
    model = make_contiguous_model(model_name, devices[0])
    wrapped = wrap(strategy, model, devices, watch)
    optimizer = make_optimizer(model.parameters())

    def save(tensor: torch.Tensor) -> torch.Tensor:
        base = tensor if tensor._base is None else tensor._base
        if not (base.is_leaf and base.requires_grad):  # neither a parameter nor a view of one
            saved.append(tensor.detach())
        return tensor.detach()

    for _ in range(STEPS_TO_COUNT[strategy]):
        optimizer.zero_grad()
        buckets.clear()
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            loss = F.cross_entropy(wrapped(images), labels)
        older: set = set()
        bytes_of([images, labels, *model.buffers()], older)
        activations = bytes_of(saved, older)
        saved.clear()
        loss.backward()
        optimizer.step()
    sizes = {**held(model, optimizer, buckets), "copies": max(copies), "activations": activations}
    return {kind: sizes[kind] for kind in KINDS}


def measure_growth(
    strategy: str, model_name: str, make_optimizer: Callable, devices: list, images, labels
) -> list[Bytes]:
    """Train, and return how much each kind of memory grows on each device, in bytes.

    "buckets" is all memory still allocated between two steps, except parameters and optimizer
    state.
    """
    at, copies = {"start": bytes_held(devices)}, []

    def note(moment: str) -> None:
        at[moment] = bytes_held(devices)

    def growth(first: str, second: str) -> list[int]:
        return [new - old for old, new in zip(at[first], at[second], strict=True)]

    def after_copies(tensors) -> None:
        note("after copies")
        copies.append(growth("before copies", "after copies"))

    model = make_contiguous_model(model_name, devices[0])
    note("model")
    wrapped = wrap(strategy, model, devices, Watch(lambda: note("before copies"), after_copies))
    note("wrapped")
    optimizer = make_optimizer(model.parameters())
    # Train for an additional step, because the first step also allocates the optimizer state.
    for step in range(STEPS_TO_COUNT[strategy] + 1):
        note("before")
        loss = F.cross_entropy(wrapped(images), labels)
        note("forward")
        loss.backward()
        del loss
        note("backward")
        optimizer.step()
        if step == 0:
            note("step")
            state = growth("backward", "step")
        optimizer.zero_grad()
    # Measure FSDP2's parameters after wrapping, which frees the unsharded parameters. Measure DDP's
    # parameters before wrapping, which allocates the first buckets.
    parameters = growth("start", "wrapped" if strategy == "FSDP2" else "model")
    remaining, forward = growth("start", "before"), growth("before", "forward")
    gradients = growth("before", "backward")
    measured = []
    for index in range(len(at["start"])):
        most = max((sizes[index] for sizes in copies), default=0)
        in_forward = most if strategy == "nn.DataParallel" else 0  # copies are kept until backward
        sizes = {
            "parameters": parameters[index],
            "gradients": gradients[index],
            "optimizer state": state[index],
            "buckets": remaining[index] - parameters[index] - state[index],
            "copies": most,
            "activations": forward[index] - in_forward,
        }
        measured.append(sizes)
    return measured


def bytes_held(devices: list[torch.device]) -> list[int]:
    """Return the bytes allocated on each GPU. On the CPU, return the process's resident bytes.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management
    """
    if devices[0].type == "cuda":
        for device in devices:
            torch.cuda.synchronize(device)
        return [torch.cuda.memory_allocated(device) for device in devices]
    now = _resident_bytes()
    for _ in range(50):  # a gloo thread may still be freeing tensors: wait until it is done
        time.sleep(0.02)
        before, now = now, _resident_bytes()
        if now == before:
            break
    return [now]


def _resident_bytes() -> int:
    with suppress(AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def batch(images: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return synthetic images and their labels."""
    pixels = torch.linspace(-1, 1, images * 28 * 28, device=device)
    return pixels.view(-1, 1, 28, 28).sin(), torch.arange(images, device=device) % CLASSES


@dataclass(frozen=True)
class Watch:
    """Callbacks that run before and after parameters are copied, and for each full DDP bucket.

    nn.DataParallel and FSDP2 copy parameters in every step. To measure the memory of a copy alone,
    `wrap` makes an additional copy before training, with the same function.
    """

    before_copies: Callable[[], None]
    after_copies: Callable[[Iterable[torch.Tensor]], None]
    bucket: Callable[[torch.Tensor], None] = lambda tensor: None


def wrap(strategy: str, model: nn.Module, devices: list, watch: Watch) -> nn.Module:
    """Wrap the model for this strategy. The model must already be on the first device."""
    wrapper = {"nn.DataParallel": _data_parallel, "DDP": _ddp, "FSDP2": _fsdp}[strategy]
    return wrapper(model, devices, watch)


def _data_parallel(model: nn.Module, devices: list, watch: Watch) -> nn.Module:
    """Wrap with nn.DataParallel, or with our version on the CPU, where torch makes no replicas."""
    watch.before_copies()
    replicas = phases.replicate(model, devices)
    names = [name for name, _ in model.named_parameters()]
    watch.after_copies(_parameter(copy, name) for copy in replicas[1:] for name in names)
    if devices[0].type == "cpu":
        return phases.DataParallel(model, devices)
    return nn.DataParallel(model, devices)


def _ddp(model: nn.Module, devices: list, watch: Watch) -> nn.Module:
    wrapped = DistributedDataParallel(model)

    def reduce(group, bucket: dist.GradBucket):
        watch.bucket(bucket.buffer())
        return allreduce_hook(group, bucket)  # what DDP does without a hook

    wrapped.register_comm_hook(None, reduce)
    return wrapped


def _fsdp(model: nn.Module, devices: list, watch: Watch) -> nn.Module:
    """Shard each layer separately, and gather the largest layer once, so that `watch` measures it.

    The measurement does not include the all-gather buffer. FSDP2 keeps this buffer only in forward,
    until it gathers the next layer.
    Source: wait_for_unshard in torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py
    """
    mesh = init_device_mesh(devices[0].type, (dist.get_world_size(),))
    layers = [layer for layer in model.modules() if [*layer.parameters(recurse=False)]]
    largest: Any = max(layers, key=lambda layer: bytes_of(layer.parameters(recurse=False)))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    watch.before_copies()
    largest.unshard()
    watch.after_copies(largest.parameters(recurse=False))
    largest.reshard()
    return model


def _parameter(replica: nn.Module, name: str) -> torch.Tensor:
    """Return a replica's parameter. It is a plain attribute, so `get_parameter` cannot find it."""
    path, _, last = name.rpartition(".")
    return getattr(replica.get_submodule(path), last)
