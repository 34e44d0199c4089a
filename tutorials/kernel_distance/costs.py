"""Measure the time and peak memory of each kernel-distance method."""

import ctypes
import math
import multiprocessing
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from methods import METHODS, predicted_graph_bytes, reference

from accel_demo import show
from accel_demo.processes.connect import gather_objects

MOST_DIFFERENCES = 1e8  # with more differences, chunked methods are timed only once
MOST_GRAPH_BYTES = 5e8  # methods with a larger graph are not run
MOST_PAIRS = 128**2  # in the double loop; more pairs would take minutes
EXPLANATION = """\
seconds: one forward and backward, the fastest of five; a single run for chunks in a large layer.
peak memory: growth of a separate process, with weight.grad; with several ranks, the largest.
error: of value or gradient, whichever is larger, relative to the largest of a float64 reference."""


@dataclass(frozen=True)
class MethodCost:
    """The cost of one method for one layer, or the reason why it was not run."""

    method: str
    reason_not_run: str = ""
    seconds: float = 0.0
    peak_bytes: int = 0
    error: float = 0.0

    def cells(self) -> list[str]:
        if self.reason_not_run:
            return [self.method, "", f"not run: {self.reason_not_run}", ""]
        seconds = f"{self.seconds:.2g}" if self.seconds < 100 else f"{self.seconds:.0f}"
        return [self.method, seconds, _in_megabytes(self.peak_bytes), f"{self.error:.0e}"]


def make_weight(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return a random weight that is the same in every process."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return weight.to(device).requires_grad_()


def measure(method: str, shape, p: int, device) -> tuple[float, int, float, torch.Tensor]:
    """Run a method in this process. Return its seconds, peak bytes, value and gradient."""
    with suppress(AttributeError, TypeError, OSError):  # `mallopt` exists only in glibc
        ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: return freed tensors to the system
    compute = METHODS[method]
    for _ in range(2):  # warm up: the first calls also load libraries
        compute(make_weight((5, 1, 3, 3), device), p).backward()
    times, peaks = [], []
    is_slow = "chunked" in method and shape[0] ** 2 * math.prod(shape[1:]) > MOST_DIFFERENCES
    for _ in range(1 if is_slow else 5):
        weight = make_weight(shape, device)
        before = _reset_peak(device)
        if method.startswith("over ranks"):
            dist.barrier()
        start = time.perf_counter()
        value = compute(weight, p)
        value.backward()
        value = value.item()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
        peaks.append(_peak(device) - before)
    # Return the time of the fastest run, because other programs can only add time:
    # https://docs.python.org/3/library/timeit.html
    return min(times), max(0, *peaks), value, weight.grad.cpu()


def _reset_peak(device: torch.device) -> int:
    """Reset the recorded peak memory, and return the number of bytes in use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    with suppress(OSError):  # works only on Linux; elsewhere, an earlier peak may hide this peak
        Path("/proc/self/clear_refs").write_text("5")
    return psutil.Process().memory_info().rss


def _peak(device: torch.device) -> int:
    """Return the peak of torch's allocations on a GPU, or of the process's memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        status = Path("/proc/self/status").read_text()
        (kilobytes,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
        return 1024 * int(kilobytes)
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure_all(device: torch.device, shapes: list[tuple[int, ...]]) -> None:
    """Measure all methods. Rank 0 runs the single-process methods, and prints the results."""
    for shape in shapes:
        for p in (1, 2):
            expected = _on_rank_0(reference, make_weight(shape, torch.device("cpu")).detach(), p)
            names = [name for name in METHODS if name != "closed form" or p == 1]
            rows = [_measure_method(name, shape, p, device, expected) for name in names]
            if dist.get_rank() == 0:
                kind = {1: "absolute differences", 2: "Euclidean distances"}[p]
                size = _in_megabytes(4 * math.prod(shape))
                print(f"{' × '.join(map(str, shape))}, {kind} (p={p}), a weight of {size} MB:\n")
                head = ["method", "seconds", "peak memory in MB", "error"]
                print(f"{show.table(head, [cost.cells() for cost in rows])}\n", flush=True)
    if dist.get_rank() == 0:
        print(EXPLANATION)


def _measure_method(method: str, shape, p: int, device: torch.device, expected) -> MethodCost:
    """Measure one method. Only rank 0 has the expected results and computes the error."""
    graph_size = predicted_graph_bytes(method, shape, dist.get_world_size())
    if graph_size > MOST_GRAPH_BYTES:
        return MethodCost(method, f"keeps {_in_megabytes(graph_size)}")
    if method == "double loop" and shape[0] ** 2 > MOST_PAIRS:
        return MethodCost(method, "too many pairs")
    if method.startswith("over ranks"):
        run = measure(method, shape, p, device)
    else:
        run = _on_rank_0(measure, method, shape, p, device)
    costs = filter(None, gather_objects(run and run[:2]))
    seconds, peak_bytes = map(max, zip(*costs, strict=True))
    error = 0.0
    if expected and run:
        (right_value, right_gradient), (_, _, value, gradient) = expected, run
        off = (gradient - right_gradient).abs().max() / right_gradient.abs().max().clamp(min=1)
        error = max(off.item(), abs(value - right_value) / max(right_value, 1))
    return MethodCost(method, "", seconds, peak_bytes, error)


def _on_rank_0(function, *arguments):
    """On rank 0, call the function in a separate process and return its result.

    The other ranks return None. Meanwhile all ranks call short collectives, so that no waiting rank
    times out.
    """
    multiprocessing.set_forkserver_preload(["torch", "psutil"])
    context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else None)
    with ProcessPoolExecutor(1, mp_context=context) as own_process:
        future = own_process.submit(function, *arguments) if dist.get_rank() == 0 else None
        is_done = [False]
        while not is_done[0]:
            time.sleep(0.1)
            is_done = [future is not None and future.done()]
            dist.broadcast_object_list(is_done)
        return future.result() if future else None


def _in_megabytes(size: float) -> str:
    return f"{size / 1e6:,.1f}" if size < 1e7 else f"{size / 1e6:,.0f}"
