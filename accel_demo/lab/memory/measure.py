"""What a training step holds, counted on live tensors and measured on the process or the GPU."""

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
    make_network,
)
from accel_demo.lab.memory.formula import KINDS, Bytes
from accel_demo.models import CLASSES

# DDP makes its final buckets at the start of the second step, and fills them at its end. The others
# make the same in every step; the optimizer's state is there from the end of the first.
STEPS_TO_COUNT = {"nn.DataParallel": 1, "DDP": 2, "FSDP2": 1}
STEPS_TO_READ = {"nn.DataParallel": 2, "DDP": 3, "FSDP2": 2}
MMAP_BYTES = 64 * 1024  # larger pieces go back to the system when they are freed


def measure_each(device: torch.device, strategies: list[str], *choices) -> dict[str, dict]:
    """`measure` of each of these strategies, one after the other, in the same processes."""
    return {strategy: measure(device, strategy, *choices) for strategy in strategies}


def measure(
    device: torch.device, strategy: str, model: str, optimizer: str, replicas: int, batch_size: int
) -> dict:
    """What this process holds under a strategy: "counted", and "measured" at each of its places.

    A place is a device, but all of nn.DataParallel's `replicas` on a CPU are one. The training
    happens twice. First the tensors are counted, and what stays for good is made: libraries, their
    scratch memory, connections. Then the bytes of the process are read. Every rank has to call it;
    nn.DataParallel's one process needs no group.
    """
    give_freed_memory_back()
    is_data_parallel = strategy == "nn.DataParallel"
    devices = devices_of_a_process(device, replicas) if is_data_parallel else [device]
    images, labels = batch(batch_size * len(devices), device)
    arguments = (strategy, model, OPTIMIZERS[optimizer], devices, images, labels)
    counted = count(*arguments)
    if is_data_parallel:
        del counted["activations"]  # autograd does not tell what is kept in other threads
    gc.collect()
    measured = read_between(*arguments)
    return {
        "connected_processes": dist.get_world_size() if dist.is_initialized() else 1,
        "device": device.type,
        "counted": counted,
        "measured": measured,
    }


def count(
    strategy: str, model: str, make_optimizer: Callable, devices: list, images, labels
) -> Bytes:
    """The bytes of the live tensors of each kind, in the last of some steps.

    The activations are the tensors autograd keeps for backward, without those that were there.
    Source: https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.saved_tensors_hooks
    """
    buckets, copies, kept = [], [0], []
    watch = Watch(
        before_copies=lambda: None,
        after_copies=lambda tensors: copies.append(bytes_of(tensors)),
        bucket=buckets.append,
    )
    network = make_network(model, devices[0])
    wrapped = wrap(strategy, network, devices, watch)
    optimizer = make_optimizer(network.parameters())

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        whole = tensor if tensor._base is None else tensor._base
        if not (whole.is_leaf and whole.requires_grad):  # a parameter, or a view of one
            kept.append(tensor.detach())
        return tensor.detach()

    for _ in range(STEPS_TO_COUNT[strategy]):
        optimizer.zero_grad()
        buckets.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = F.cross_entropy(wrapped(images), labels)
        there_already: set = set()
        bytes_of([images, labels, *network.buffers()], there_already)
        activations = bytes_of(kept, there_already)
        kept.clear()
        loss.backward()
        optimizer.step()
    found = {**held(network, optimizer, buckets), "copies": max(copies), "activations": activations}
    return {kind: found[kind] for kind in KINDS}


def read_between(
    strategy: str, model: str, make_optimizer: Callable, devices: list, images, labels
) -> list[Bytes]:
    """The bytes of each kind at each place: differences of what is held before and after.

    The buckets are what stays between two steps and is neither parameter nor optimizer state.
    """
    at, copies = {"start": held_at(devices)}, []

    def note(moment: str) -> None:
        at[moment] = held_at(devices)

    def between(first: str, second: str) -> list[int]:
        return [new - old for old, new in zip(at[first], at[second], strict=True)]

    def after_copies(tensors) -> None:
        note("after copies")
        copies.append(between("before copies", "after copies"))

    network = make_network(model, devices[0])
    note("network")
    wrapped = wrap(strategy, network, devices, Watch(lambda: note("before copies"), after_copies))
    note("wrapped")
    optimizer = make_optimizer(network.parameters())
    for step in range(STEPS_TO_READ[strategy]):
        note("before")
        loss = F.cross_entropy(wrapped(images), labels)
        note("forward")
        loss.backward()
        del loss
        note("backward")
        optimizer.step()
        if step == 0:
            note("step")
            state = between("backward", "step")
        optimizer.zero_grad()
    # FSDP2 frees what it has cut into shares. DDP makes its first buckets there.
    parameters = between("start", "wrapped" if strategy == "FSDP2" else "network")
    stays, forward = between("start", "before"), between("before", "forward")
    gradients = between("before", "backward")
    found = []
    for place in range(len(at["start"])):
        most = max((one[place] for one in copies), default=0)
        in_forward = most if strategy == "nn.DataParallel" else 0  # its copies stay till backward
        sizes = {
            "parameters": parameters[place],
            "gradients": gradients[place],
            "optimizer state": state[place],
            "buckets": stays[place] - parameters[place] - state[place],
            "copies": most,
            "activations": forward[place] - in_forward,
        }
        found.append(sizes)
    return found


def held_at(devices: list[torch.device]) -> list[int]:
    """Bytes in tensors on each GPU, by CUDA's allocator; on a CPU those of the process, in memory.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management
    """
    if devices[0].type == "cuda":
        for device in devices:
            torch.cuda.synchronize(device)
        return [torch.cuda.memory_allocated(device) for device in devices]
    now = _resident_bytes()
    for _ in range(50):  # a thread of gloo frees the tensors of a collective some time after it
        time.sleep(0.02)
        before, now = now, _resident_bytes()
        if now == before:
            break
    return [now]


def _resident_bytes() -> int:
    with suppress(AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def give_freed_memory_back() -> None:
    """Let the C library give each large piece back as soon as it is freed.

    Else a process never shrinks as its tensors go, and says nothing of them. Where the C library is
    not glibc nothing changes. Source: https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    mmap_threshold, trim_threshold = -3, -1  # their numbers in malloc.h; both are set in bytes
    with suppress(AttributeError, TypeError):  # no mallopt: macOS; no C library by name: Windows
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(mmap_threshold, MMAP_BYTES)
        mallopt(trim_threshold, MMAP_BYTES)


def batch(images: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Images that look like nothing, and labels."""
    pixels = torch.linspace(-1, 1, images * 28 * 28, device=device)
    return pixels.view(-1, 1, 28, 28).sin(), torch.arange(images, device=device) % CLASSES


@dataclass(frozen=True)
class Watch:
    """What is called around the making of copies of parameters, and with each full bucket of DDP.

    nn.DataParallel and FSDP2 make copies in every step. Those that are watched are made for that
    alone, with the same function, so that nothing else is made meanwhile.
    """

    before_copies: Callable[[], None]
    after_copies: Callable[[Iterable[torch.Tensor]], None]
    bucket: Callable[[torch.Tensor], None] = lambda tensor: None


def wrap(strategy: str, network: nn.Module, devices: list, watch: Watch) -> nn.Module:
    """The module to call in place of the network, which is on the first of the devices."""
    how = {"nn.DataParallel": _data_parallel, "DDP": _ddp, "FSDP2": _fsdp}[strategy]
    return how(network, devices, watch)


def _data_parallel(network: nn.Module, devices: list, watch: Watch) -> nn.Module:
    """Ours on a CPU, where PyTorch's own only calls the network."""
    record: list = []
    watch.before_copies()
    replicas = phases.replicate(network, devices, record)
    names = [name for name, _ in network.named_parameters()]
    watch.after_copies(_tensor_at(copy, name) for copy in replicas[1:] for name in names)
    if devices[0].type == "cpu":
        return phases.DataParallel(network, devices)
    return nn.DataParallel(network, devices)


def _ddp(network: nn.Module, devices: list, watch: Watch) -> nn.Module:
    wrapped = DistributedDataParallel(network)

    def share(group, bucket: torch.distributed.GradBucket):
        watch.bucket(bucket.buffer())
        return allreduce_hook(group, bucket)  # what DDP does without a hook

    if watch.bucket:
        wrapped.register_comm_hook(None, share)
    return wrapped


def _fsdp(network: nn.Module, devices: list, watch: Watch) -> nn.Module:
    """Each layer is gathered on its own; the largest is gathered here once, to be watched.

    In forward FSDP2 also keeps the buffer a layer came in, until the next one has come.
    Source: wait_for_unshard in torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py
    """
    mesh = init_device_mesh(devices[0].type, (dist.get_world_size(),))
    layers = [layer for layer in network.modules() if [*layer.parameters(recurse=False)]]
    largest: Any = max(layers, key=lambda layer: bytes_of(layer.parameters(recurse=False)))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)
    watch.before_copies()
    largest.unshard()
    watch.after_copies(largest.parameters(recurse=False))
    largest.reshard()
    return network


def _tensor_at(module: nn.Module, name: str) -> torch.Tensor:
    """A replica's parameters are plain attributes: `get_parameter` does not find them."""
    path, _, last = name.rpartition(".")
    return getattr(module.get_submodule(path), last)
