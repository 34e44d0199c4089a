"""What a way of `kernel_distance` costs: time, memory at the peak, memory its graph keeps."""

import ctypes
import math
import multiprocessing
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import cast

import psutil
import torch
import torch.distributed as dist

from accel_demo import show
from accel_demo.anatomy.flags import command_line, read
from accel_demo.anatomy.kernel_distance import methods
from accel_demo.errors import UserError, one_line_errors
from accel_demo.processes.connect import gather_objects
from accel_demo.processes.group import run_in_group

MOST_DIFFERENCES = 1e8  # with more of them, what computes them twice is run only once
MOST_KEPT = 5e8  # bytes: a way whose graph keeps more than this is not run
MOST_PAIRS = 128**2  # of the double loop: more take minutes
EXPLANATION = """\
seconds: one forward and backward, the fastest of five; of chunks in a large layer one run alone.
peak memory: what a process of its own grows by, weight.grad included; of several ranks the most.
error: of value and gradient, the larger, relative to the largest of a float64 reference."""


def library(weight: torch.Tensor, p: int = 1) -> torch.Tensor:
    """torch's own pairwise distances, added up. Its graph keeps them, n × n, and no difference."""
    kernels = weight.flatten(1)
    return torch.cdist(kernels, kernels, p=p).sum()


def two_devices(weight: torch.Tensor, p: int = 1) -> torch.Tensor:
    """Every GPU; without one the CPU stands for two, which have their shares in the same memory."""
    devices: list[torch.device | str] | None = None if weight.is_cuda else ["cpu", "cpu"]
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
    return min(times), max(0, *peaks), value, cast(torch.Tensor, weight.grad).cpu()


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
        (kilobytes,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
        return 1024 * int(kilobytes)
    memory = psutil.Process().memory_info()
    if sys.platform == "win32":
        return memory.peak_wset
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """What `python -m accel_demo.anatomy.kernel_distance` does."""
    with one_line_errors():
        parser = command_line(methods.__doc__, processes=2)
        help = "kernels x input channels of the layers to measure, each kernel 3 × 3 (default: "
        help += "128x64 512x512)"
        layers = ["128x64", "512x512"]
        parser.add_argument("--layers", nargs="+", metavar="NxC", default=layers, help=help)
        options = read(parser)
        options.layers = [_shape(layer) for layer in options.layers]
        run_in_group(measure_all, options.processes, options)


def measure_all(device: torch.device, options) -> None:
    """One of the connected processes. Rank 0 also measures what needs one process, and prints."""
    results = {}
    for shape in options.layers:
        for p in (1, 2):
            expected = _on_rank_0(_reference, shape, p)
            rows = {way: _measure_way(way, shape, p, device, expected) for way in WAYS}
            rows = {way: row for way, row in rows.items() if row}
            results[shape, p] = rows
            if dist.get_rank() == 0:
                kind = {1: "absolute differences", 2: "Euclidean distances"}[p]
                title = f"{' × '.join(map(str, shape))}, {kind} (p={p})"
                size = _in_megabytes(4 * math.prod(shape))
                print(f"{title}, a weight of {size} MB:\n")
                head = ["way", "seconds", "peak memory in MB", "error"]
                print(show.table(head, [_cells(way, row) for way, row in rows.items()]), flush=True)
                print(flush=True)
    if dist.get_rank() == 0:
        print(EXPLANATION)
        if options.plot:
            show.save(draw(results), options.plot)


def draw(results: dict) -> object:
    """Peak memory: a panel for each layer and p. Hatched: what the graph alone would keep."""
    figure = show.new_figure(8, 1.2 + 2.4 * len(results) / 2)
    panels = figure.subplots(-(-len(results) // 2), 2, sharex=True, sharey=True, squeeze=False)
    ways = list(WAYS)[::-1]
    for panel, ((shape, p), rows) in zip(panels.flat, results.items(), strict=True):
        for way, row in rows.items():
            colour, hatch = (show.COLOURS[0], None) if len(row) == 3 else ("white", "////")
            size = max(row[-2] if len(row) == 3 else row[0], 1e5) / 1e6
            panel.barh(ways.index(way), size, color=colour, hatch=hatch, edgecolor="#555555")
        for way in (way for way in ways if way not in rows):  # empty, it would look like no memory
            place = {"va": "center", "transform": panel.get_yaxis_transform()}  # x from 0 to 1
            panel.text(0.02, ways.index(way), f"there is none for p={p}", fontsize=9, **place)
        panel.set_title(f"{' × '.join(map(str, shape))}, p={p}", fontsize=10)
        panel.set_xscale("log")
        panel.set_yticks(range(len(ways)), ways, fontsize=9)
        panel.grid(axis="x", alpha=0.3)
        panel.set_axisbelow(True)
    figure.supxlabel("peak memory in MB (hatched: not run, its graph alone would keep so much)")
    return figure


def _measure_way(way, shape, p, device, expected) -> tuple | None:
    """(seconds, bytes, error), or (bytes to keep, reason) where not run; None: there is no such."""
    if way == "closed form" and p == 2:
        return None
    ranks = dist.get_world_size()
    kept = bytes_to_keep(way, shape, ranks)
    if kept > MOST_KEPT:
        return kept, f"not run: keeps {_in_megabytes(kept)}"
    if way == "double loop" and shape[0] ** 2 > MOST_PAIRS:
        return kept, "not run: too many pairs"
    if way.startswith("over ranks"):
        mine = measure(way, shape, p, device)
    else:
        mine = _on_rank_0(measure, way, shape, p, device)
    everyone = gather_objects(mine and mine[:2])
    seconds, peak = (max(numbers) for numbers in zip(*filter(None, everyone), strict=True))
    if expected is None or mine is None:
        return seconds, peak, 0.0
    value, gradient = expected
    error = ((mine[3] - gradient).abs().max() / gradient.abs().max().clamp(min=1)).item()
    return seconds, peak, max(error, abs(mine[2] - value) / max(value, 1))


def _reference(shape: tuple[int, ...], p: int) -> tuple[float, torch.Tensor]:
    return reference(make_weight(shape, torch.device("cpu")), p)


def _on_rank_0(function, *arguments):
    """What it gives in a process of its own; None on other ranks.

    They keep meeting rank 0, so that nobody waits for long in one collective.
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


def _cells(way: str, row: tuple) -> list:
    if len(row) == 2:
        return [way, "", row[1], ""]
    seconds, peak, error = row
    time_taken = f"{seconds:.2g}" if seconds < 100 else f"{seconds:.0f}"
    return [way, time_taken, _in_megabytes(peak), f"{error:.0e}"]


def _in_megabytes(size: float) -> str:
    return f"{size / 1e6:,.1f}" if size < 1e7 else f"{size / 1e6:,.0f}"


def _shape(layer: str) -> tuple[int, int, int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)", layer)
    if not match or not 1 <= int(match[1]) <= 512 or not 1 <= int(match[2]) <= 512:
        raise UserError(f"--layers takes NxC, each from 1 to 512, as in 128x64, got {layer}")
    return int(match[1]), int(match[2]), 3, 3
