"""A call returns before its work is done: all-reduce on any device, everything on a GPU.

python -m accel_demo.anatomy.asynchronous
"""

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from accel_demo import show
from accel_demo.anatomy.flags import command_line, read
from accel_demo.errors import UserError, one_line_errors
from accel_demo.processes.group import run_in_group

ALONE = "at least 2 processes are needed: one alone has nobody to wait for"


def time_enqueued(
    device: torch.device, size: int = 8192, products: int = 10
) -> tuple[float, float]:
    """Seconds until the calls for matrix products have returned, and until the GPU is done.

    With CUDA_LAUNCH_BLOCKING=1 each call waits. Raises `ValueError` for the CPU, whose calls do.
    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution
    """
    if device.type != "cuda":
        raise ValueError(f"device must be a CUDA GPU, got {device}")
    matrix = torch.ones(size, size, device=device)
    torch.mm(matrix, matrix)  # the first call also loads the library
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(products):
        torch.mm(matrix, matrix)
    enqueued = time.perf_counter() - started
    torch.cuda.synchronize(device)
    return enqueued, time.perf_counter() - started


def all_reduce_early(device: torch.device) -> tuple[bool, bool, float]:
    """Rank 0 starts an all-reduce; the others join when they are told that its call has returned.

    They are told over a second group. Every rank brings its number + 1. Gives whether the work was
    completed then, whether it is after `wait()`, and the sum. Raises `ValueError` where there is no
    other rank.
    """
    if dist.get_world_size() < 2:
        raise ValueError("all_reduce_early needs at least two processes")
    telling: Any = dist.new_group(backend="gloo")
    total = torch.tensor([dist.get_rank() + 1.0], device=device)
    was_completed = torch.zeros(1)
    if dist.get_rank() == 0:
        work = dist.all_reduce(total, async_op=True)
        was_completed[0] = work.is_completed()
    dist.broadcast(was_completed, 0, group=telling)
    if dist.get_rank() > 0:
        work = dist.all_reduce(total, async_op=True)
    work.wait()
    number = total.item()  # on a GPU `wait()` holds up its stream only; this waits for the GPU
    return bool(was_completed), work.is_completed(), number


def draw(file: Path) -> None:
    """What happens on each rank, from left to right, in the order `all_reduce_early` enforces."""
    figure = show.new_figure(9, 2.6)
    axes = figure.subplots()
    axes.set(xlim=(-1.3, 9.6), ylim=(-0.8, 2.5))
    axes.axis("off")
    events = [  # (from, to, rank, colour, what)
        (0, 1.6, 0, 0, "call all_reduce"),
        (2.0, 3.6, 0, 2, "it has returned"),
        (4.2, 5.8, 1, 0, "call all_reduce"),
        (3.9, 6.9, 0, 1, "do something else"),
        (7.2, 9.2, 0, 3, "wait(): the sum"),
        (6.2, 9.2, 1, 3, "wait(): the sum"),
    ]
    for first, last, rank, colour, what in events:
        place, style = 1.5 * (1 - rank), {"color": show.COLOURS[colour], "alpha": 0.35}
        axes.barh(place, last - first, 0.6, first, **style)
        axes.text((first + last) / 2, place, what, ha="center", va="center", fontsize=9)
    for rank in (0, 1):
        axes.text(-1.3, 1.5 * (1 - rank), f"rank {rank}", va="center", fontsize=10)
    arrow = {"arrowstyle": "->", "color": "#555555"}
    axes.annotate("", (4.4, 0.35), (3.5, 1.15), arrowprops=arrow)
    axes.text(3.75, 0.72, "told", ha="right", va="center", fontsize=9, color="#555555")
    axes.annotate("", (9.3, -0.6), (0, -0.6), arrowprops=arrow)
    axes.text(4.6, -0.75, "order in time", ha="center", va="top", fontsize=9, color="#555555")
    show.save(figure, file)


def main(device: torch.device, options) -> None:
    if dist.get_world_size() < 2:  # a launcher has decided how many
        raise UserError(ALONE)
    was_completed, is_completed, total = all_reduce_early(device)
    if dist.get_rank() > 0:
        return
    head = ["on rank 0", "the other ranks", "`is_completed()`", "the tensor"]
    early = ["the call has returned", "have not called it", was_completed, "not to be read yet"]
    late = ["`wait()` has returned", "have joined", is_completed, total]
    print(show.table(head, [early, late]))
    if device.type == "cuda":
        enqueued, done = time_enqueued(device)
        print(f"\nten products: called in {enqueued * 1e3:.1f} ms, done in {done * 1e3:.1f} ms")
    if options.plot:
        draw(options.plot)


if __name__ == "__main__":
    with one_line_errors():
        options = read(command_line(__doc__, processes=2))
        if options.processes < 2:
            raise UserError(ALONE)
        run_in_group(main, options.processes, options)
