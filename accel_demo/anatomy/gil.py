"""Compare two threads with two processes: Python code waits for the GIL, torch code does not.

`accel-demo scaling` prints and draws the result.

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
from typing import Any, NamedTuple

import torch

from accel_demo.progress_bar import ProgressBar

PARTS = 2  # one part of the work for each worker
WORKERS = ONE_AFTER_THE_OTHER, THREADS, PROCESSES = (
    "one after the other",
    "two threads",
    "two processes",
)


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


def measure(repeats: int) -> dict[str, dict[str, list[WorkTime]]]:
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
        for _ in ProgressBar("gil", "repeat", range(repeats), is_shown=repeats > 1):
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


def cores_busy(times: list[WorkTime]) -> float:
    """Return the median number of busy cores over all repetitions."""
    return statistics.median(time.cores_busy for time in times)


def has_gil() -> bool:
    """Return whether this Python has a GIL. Builds without a GIL have existed since Python 3.13."""
    return getattr(sys, "_is_gil_enabled", lambda: True)()
