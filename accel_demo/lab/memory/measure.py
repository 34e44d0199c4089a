"""What a training step holds, counted on live tensors and measured on the process or the GPU."""

import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F

from accel_demo.anatomy.memory.count import (
    OPTIMIZERS,
    bytes_of,
    devices_of_a_process,
    held,
    make_network,
)
from accel_demo.lab.memory.formula import KINDS, Bytes
from accel_demo.lab.memory.strategies import Watch, wrap
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
    with suppress(AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
    return [psutil.Process().memory_info().rss]


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
