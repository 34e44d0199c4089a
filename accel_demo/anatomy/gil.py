"""Compare two threads with two processes: Python code waits for the GIL, torch code does not.

python -m accel_demo.anatomy.gil
python -m accel_demo.anatomy.gil --plot gil.svg

In CPython only one thread runs Python code at a time: the thread that holds the global interpreter
lock. torch releases the lock while it computes. So threads help only if most of the time is spent
in torch, whereas processes help in both cases. This is one reason why DDP and DataLoader workers
use processes.
Source: https://docs.python.org/3/glossary.html#term-global-interpreter-lock
"""

import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from accel_demo.errors import one_line_errors
from accel_demo.options import Parser
from accel_demo.show import COLORS, new_figure, save, table

REPEATS = 7
PARTS = 2  # one part of the work for each worker
WORKERS = ("one after the other", "two threads", "two processes")


class WorkTime(NamedTuple):
    """The wall-clock time of one repetition, and the workers' CPU time divided by that time."""

    seconds: float
    cores_busy: float


def preprocess(number_of_images: int) -> float:
    """Flip, shift and scale 28×28 images in pure Python, and return the sum of all their pixels."""
    draw, total = random.Random(0), 0.0
    for _ in range(number_of_images):
        image = [[draw.random() for _ in range(28)] for _ in range(28)]
        flipped = [row[::-1] for row in image]
        shifted = [row[2:] + row[:2] for row in flipped]
        total += sum(sum((pixel - 0.5) * 2 for pixel in row) for row in shifted)
    return total


def multiply(times: int) -> float:
    """Compute the square of a 512×512 matrix several times. Return one element of the square."""
    draw = torch.Generator().manual_seed(0)
    matrix = torch.randn(512, 512, generator=draw)
    for _ in range(times):
        product = matrix @ matrix
    return float(product[0, 0])


WORK: dict[str, tuple[Callable, int]] = {
    "preprocessing in Python": (preprocess, 400),
    "matrix products in torch": (multiply, 50),
}


def measure(repeats: int = REPEATS) -> dict[str, dict[str, list[WorkTime]]]:
    """Split each kind of work into two parts, and time them with each kind of worker in turn.

    Threads and processes are started before the timing begins. Raises `RuntimeError` if the results
    differ.
    """
    context = multiprocessing.get_context("spawn")
    times = {kind: {workers: [] for workers in WORKERS} for kind in WORK}
    start: dict[str, Any] = {"initializer": torch.set_num_threads, "initargs": (1,)}
    with (
        one_torch_thread(),
        ThreadPoolExecutor(PARTS, **start) as threads,
        ProcessPoolExecutor(PARTS, context, **start) as processes,
    ):
        executors: list[Executor | None] = [None, threads, processes]
        for executor in executors:
            for function, _ in WORK.values():
                in_parts(executor, function, 1)
        for _ in tqdm(range(repeats), desc="gil", unit="repeat", disable=repeats == 1):
            for kind, (function, amount) in WORK.items():
                results = []
                for workers, executor in zip(WORKERS, executors, strict=True):
                    started_at = time.perf_counter()
                    parts = in_parts(executor, function, amount)
                    seconds = time.perf_counter() - started_at
                    results.append([result for result, _ in parts])
                    cores_busy = sum(cpu_seconds for _, cpu_seconds in parts) / seconds
                    times[kind][workers].append(WorkTime(seconds, cores_busy))
                if results[1:] != results[:-1]:
                    raise RuntimeError(f"{kind}: the results differ: {results}")
    return times


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Use one torch thread in this context, and restore the number of threads afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_parts(executor: Executor | None, function: Callable, amount: int) -> list[tuple]:
    """Call `timed` for each part: in the executor if there is one, otherwise in this thread."""
    mapped = executor.map if executor else map
    return list(mapped(timed, [function] * PARTS, [amount] * PARTS))


def timed(function: Callable, amount: int) -> tuple[float, float]:
    """Call the function, and return its result and the CPU seconds that this thread used."""
    started_at = time.thread_time()
    return function(amount), time.thread_time() - started_at


def speedups(times: dict[str, list[WorkTime]]) -> dict[str, float]:
    """Return each kind of worker's median speedup over running the parts one after the other."""
    references = times[WORKERS[0]]
    return {
        workers: statistics.median(
            reference.seconds / time.seconds
            for reference, time in zip(references, workers_times, strict=True)
        )
        for workers, workers_times in times.items()
    }


def cores_busy(times: list[WorkTime]) -> float:
    """Return the median number of busy cores over all repetitions."""
    return statistics.median(time.cores_busy for time in times)


def has_gil() -> bool:
    """Return whether this Python has a GIL. Builds without a GIL have existed since Python 3.13."""
    return getattr(sys, "_is_gil_enabled", lambda: True)()


def draw(speedups_by_kind: dict[str, dict[str, float]], path: Path) -> None:
    """For each kind of work, draw the speedup of each kind of worker as a group of bars."""
    figure = new_figure(7, 3.4)
    axis = figure.subplots()
    for index, workers in enumerate(WORKERS):
        places = [place + (index - 1) * 0.26 for place in range(len(speedups_by_kind))]
        heights = [by_workers[workers] for by_workers in speedups_by_kind.values()]
        bars = axis.bar(places, heights, 0.24, label=workers)
        for bar in bars:
            bar.set_color(COLORS[index])
        for label in axis.bar_label(bars, fmt="%.2f", fontsize=9, padding=2):
            label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})  # hides the line
    axis.axhline(PARTS, color="0.6", linewidth=0.8, linestyle="--")
    axis.set_xticks(range(len(speedups_by_kind)), list(speedups_by_kind))
    axis.set_ylabel("times as fast as\none after the other")
    axis.set_ylim(0, PARTS + 0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, ncols=3, loc="upper center")
    save(figure, path)


def main(arguments: list[str] | None = None) -> None:
    options = Parser(__doc__, plot=True).parse_args(arguments)
    times_by_kind = measure()
    speedups_by_kind = {kind: speedups(times) for kind, times in times_by_kind.items()}
    rows = []
    for kind, times_by_workers in times_by_kind.items():
        for workers, times in times_by_workers.items():
            seconds = statistics.median(time.seconds for time in times)
            numbers = seconds, cores_busy(times), speedups_by_kind[kind][workers]
            rows.append([kind, workers, *(f"{number:.2f}" for number in numbers)])
    print(table(["work, in two parts", "workers", "seconds", "cores busy", "times as fast"], rows))
    lock = "has the global interpreter lock" if has_gil() else "has no global interpreter lock"
    print(f"\nThis Python {lock}. Medians of {REPEATS} runs, with one torch thread per worker.")
    if options.plot:
        draw(speedups_by_kind, options.plot)


if __name__ == "__main__":
    with one_line_errors():
        main()
