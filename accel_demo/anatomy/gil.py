"""Two threads against two processes: work in Python waits for the GIL, work in torch does not.

python -m accel_demo.anatomy.gil

CPython lets one thread of a process run Python at a time: it holds the global interpreter lock.
torch gives the lock away while it computes. So threads help where the time goes into tensors, and
processes help everywhere: one reason why DDP and the DataLoader's workers are processes.
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

import torch
from tqdm import tqdm

from accel_demo.anatomy.flags import command_line, read
from accel_demo.errors import one_line_errors
from accel_demo.show import COLOURS, new_figure, save, table

REPEATS = 7
PARTS = 2  # of the work, one for each worker
WAYS = ("one after the other", "two threads", "two processes")


def preprocess(number_of_images: int) -> float:
    """Flip, shift and scale images of 28×28 in pure Python; the sum of all their pixels."""
    draw, total = random.Random(0), 0.0
    for _ in range(number_of_images):
        image = [[draw.random() for _ in range(28)] for _ in range(28)]
        flipped = [row[::-1] for row in image]
        shifted = [row[2:] + row[:2] for row in flipped]
        total += sum(sum((pixel - 0.5) * 2 for pixel in row) for row in shifted)
    return total


def multiply(times: int) -> float:
    """Multiply two matrices of 512×512 on one thread, again and again; an entry of the last."""
    draw = torch.Generator().manual_seed(0)
    matrix = torch.randn(512, 512, generator=draw)
    for _ in range(times):
        product = matrix @ matrix
    return float(product[0, 0])


WORK: dict[str, tuple[Callable, int]] = {
    "preprocessing in Python": (preprocess, 400),
    "matrix products in torch": (multiply, 50),
}


def measure(repeats: int = REPEATS) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Each kind of work, done in two parts in each of the `WAYS`, in turns.

    Gives (seconds, cores busy) of each repeat: how long it took by the clock, and what the workers
    computed meanwhile, in seconds of a core, over that. Threads and processes are there before the
    clock starts. Raises `RuntimeError` where one way has another result than the next.
    """
    context = multiprocessing.get_context("spawn")
    found = {kind: {way: [] for way in WAYS} for kind in WORK}
    with (
        one_torch_thread(),
        ThreadPoolExecutor(PARTS, initializer=torch.set_num_threads, initargs=(1,)) as threads,
        ProcessPoolExecutor(
            PARTS, context, initializer=torch.set_num_threads, initargs=(1,)
        ) as processes,
    ):
        ways: dict[str, Executor | None] = dict(zip(WAYS, (None, threads, processes), strict=True))
        for workers in (threads, processes):
            for function, _ in WORK.values():
                in_parts(workers, function, 1)
        for _ in tqdm(range(repeats), desc="gil", unit="repeat", disable=repeats == 1):
            for kind, (function, amount) in WORK.items():
                results = []
                for way, workers in ways.items():
                    started_at = time.perf_counter()
                    parts = in_parts(workers, function, amount)
                    seconds = time.perf_counter() - started_at
                    results.append([result for result, _ in parts])
                    found[kind][way].append((seconds, sum(busy for _, busy in parts) / seconds))
                if results[1:] != results[:-1]:
                    raise RuntimeError(f"{kind}: the ways do not agree: {results}")
    return found


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """One thread for torch inside, and afterwards as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_parts(workers: Executor | None, function: Callable, amount: int) -> list[tuple]:
    """`busy_with` once for each part: by the workers, or one after the other here."""
    mapped = workers.map if workers else map
    return list(mapped(busy_with, [function] * PARTS, [amount] * PARTS))


def busy_with(function: Callable, amount: int) -> tuple[float, float]:
    """The function's result, and how many seconds a core has computed for this thread."""
    started_at = time.thread_time()
    return function(amount), time.thread_time() - started_at


def speedups(found: dict[str, list[tuple[float, float]]]) -> dict[str, float]:
    """How many times faster than one after the other each way is: the median over the repeats."""
    alone = found[WAYS[0]]
    return {
        way: statistics.median(
            one / other for (one, _), (other, _) in zip(alone, values, strict=True)
        )
        for way, values in found.items()
    }


def cores_busy(values: list[tuple[float, float]]) -> float:
    """The median over the repeats."""
    return statistics.median(cores for _, cores in values)


def has_gil() -> bool:
    """Whether this Python has the lock; since 3.13 there are builds without it."""
    return getattr(sys, "_is_gil_enabled", lambda: True)()


def draw(found: dict[str, dict[str, float]], path) -> None:
    """A group of bars for each kind of work: the speed of each way."""
    figure = new_figure(7, 3.4)
    axis = figure.subplots()
    for index, way in enumerate(WAYS):
        places = [place + (index - 1) * 0.26 for place in range(len(found))]
        bars = axis.bar(places, [one[way] for one in found.values()], 0.24, label=way)
        for bar in bars:
            bar.set_color(COLOURS[index])
        for label in axis.bar_label(bars, fmt="%.2f", fontsize=9, padding=2):
            label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})  # over the line
    axis.axhline(PARTS, color="0.6", linewidth=0.8, linestyle="--")
    axis.set_xticks(range(len(found)), list(found))
    axis.set_ylabel("times as fast as\none after the other")
    axis.set_ylim(0, PARTS + 0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, ncols=3, loc="upper center")
    save(figure, path)


def main(arguments: list[str] | None = None) -> None:
    options = read(command_line(__doc__), arguments)
    measured = measure()
    found = {kind: speedups(one) for kind, one in measured.items()}
    rows = []
    for kind, ways in measured.items():
        for way, values in ways.items():
            seconds = statistics.median(seconds for seconds, _ in values)
            figures = (seconds, cores_busy(values), found[kind][way])
            rows.append([kind, way, *(f"{figure:.2f}" for figure in figures)])
    print(table(["work, in two parts", "way", "seconds", "cores busy", "times as fast"], rows))
    lock = "has the global interpreter lock" if has_gil() else "has no global interpreter lock"
    print(f"\nThis Python {lock}. Medians of {REPEATS} repeats, in turns, one torch thread each.")
    if options.plot:
        draw(found, options.plot)


if __name__ == "__main__":
    with one_line_errors():
        main()
