"""What a way of `kernel_distance` costs: time, memory at the peak, memory its graph keeps."""

import ctypes
import math
import re
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from accel_demo.anatomy.kernel_distance import methods


def library(weight: torch.Tensor, p: int = 1) -> torch.Tensor:
    """torch's own pairwise distances, added up. Its graph keeps them, n × n, and no difference."""
    kernels = weight.flatten(1)
    return torch.cdist(kernels, kernels, p=p).sum()


def two_devices(weight: torch.Tensor, p: int = 1) -> torch.Tensor:
    """Every GPU; without one the CPU stands for two, which have their shares in the same memory."""
    devices = None if weight.is_cuda else ["cpu", "cpu"]
    return methods.over_devices(weight, p, devices=devices)


# Functions of (weight, p). `library` and `two_devices` are here to be measured: they take no
# `signed`, and `library` checks nothing.
WAYS = {
    "double loop": methods.double_loop,
    "vectorised": methods.vectorised,
    "over devices": two_devices,
    "over ranks": methods.over_ranks,
    "chunked": methods.chunked,
    "over ranks, chunked": partial(methods.over_ranks, rows_at_once=4),
    "torch.cdist": library,
    "closed form": methods.closed_form,
}
MOST_DIFFERENCES = 1e8  # with more of them, what computes them twice is run only once


def bytes_kept(compute, weight: torch.Tensor) -> int:
    """How much memory the graph of `compute(weight)` keeps for backward, without the weight.

    It adds up the tensors autograd saves: the same number on every machine.
    """
    kept = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = compute(weight)
    kept.pop(weight.untyped_storage().data_ptr(), None)
    del result  # until here, so that no memory was used twice
    return sum(kept.values())


def bytes_to_keep(way: str, shape: tuple[int, ...], ranks: int) -> int:
    """What `bytes_kept` comes to in float32, in each process: a law, for layers too large to try.

    The difference of every pair that is kept has the size of a kernel, its distance 4 bytes.
    """
    weight, of_one_row = 4 * math.prod(shape), 4 * math.prod(shape) + 4 * shape[0]
    rows = {"double loop": shape[0], "vectorised": shape[0], "over devices": shape[0]}
    rows["over ranks"] = -(-shape[0] // ranks)
    others = {"torch.cdist": 4 * shape[0] ** 2, "closed form": weight}
    return rows[way] * of_one_row if way in rows else others.get(way, 0)


def make_weight(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The same random weight in every process."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return weight.to(device).requires_grad_()


def reference(weight: torch.Tensor, p: int) -> tuple[float, torch.Tensor]:
    """The value and the gradient in float64, from their formulas, row by row, without autograd."""
    kernels = weight.detach().double().cpu().flatten(1)
    value, gradient = 0.0, torch.empty_like(kernels)
    for number, one in enumerate(kernels):
        differences = one - kernels
        if p == 1:
            value += differences.abs().sum().item()
            gradient[number] = 2 * differences.sign().sum(0)
        else:
            distances = differences.square().sum(1, keepdim=True).sqrt()
            value += distances.sum().item()
            gradient[number] = 2 * (differences / distances.where(distances > 0, 1)).sum(0)
    return value, gradient.view(weight.shape)


def measure(
    way: str, shape: tuple[int, ...], p: int, device: torch.device
) -> tuple[float, int, float, torch.Tensor]:
    """Seconds, peak bytes, value and gradient of one forward and backward in this process."""
    with suppress(AttributeError, TypeError, OSError):  # not glibc: its own way is taken
        ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: freed tensors are given back
    for _ in range(2):  # what is loaded at the first use is not counted
        WAYS[way](make_weight((5, 1, 3, 3), device), p).backward()
    times, peaks = [], []
    is_slow = "chunked" in way and shape[0] ** 2 * math.prod(shape[1:]) > MOST_DIFFERENCES
    for _ in range(1 if is_slow else 5):
        weight = make_weight(shape, device)
        before = _reset_peak(device)
        if way.startswith("over ranks"):
            dist.barrier()
        started_at = time.perf_counter()
        value = WAYS[way](weight, p)
        value.backward()
        value = value.item()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started_at)
        peaks.append(_peak(device) - before)
    # What other programs do can only make it slower: https://docs.python.org/3/library/timeit.html
    return min(times), max(0, *peaks), value, weight.grad.cpu()


def _reset_peak(device: torch.device) -> int:
    """Forget the peak so far, and say how many bytes are in use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    with suppress(OSError):  # Linux alone can; elsewhere an earlier and higher peak would hide this
        Path("/proc/self/clear_refs").write_text("5")
    return psutil.Process().memory_info().rss


def _peak(device: torch.device) -> int:
    """On a GPU what torch has allocated at most; else the most this process had in memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        status = Path("/proc/self/status").read_text()
        return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])
    memory = psutil.Process().memory_info()
    if hasattr(memory, "peak_wset"):  # Windows
        return memory.peak_wset
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
