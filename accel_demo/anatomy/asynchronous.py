"""Show that async all-reduces and GPU operations return before their work is done.

python -m accel_demo.anatomy.asynchronous
python -m accel_demo.anatomy.asynchronous --processes 3 --plot asynchronous.svg
"""

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from accel_demo import show
from accel_demo.errors import one_line_errors
from accel_demo.options import Parser
from accel_demo.processes.group import run_in_group
from accel_demo.wording import duration


def time_enqueued(
    device: torch.device, size: int = 8192, products: int = 10
) -> tuple[float, float]:
    """Return the seconds until several matrix products are enqueued, and until they are computed.

    With CUDA_LAUNCH_BLOCKING=1, each call waits until its product is computed. Raises
    `ValueError` for a CPU, because calls on a CPU always wait.
    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution
    """
    if device.type != "cuda":
        raise ValueError(f"device must be a CUDA GPU, got {device}")
    matrix = torch.ones(size, size, device=device)
    torch.mm(matrix, matrix)  # warm up: the first call also loads cuBLAS
    torch.cuda.synchronize(device)
    started_at = time.perf_counter()
    for _ in range(products):
        torch.mm(matrix, matrix)
    enqueued = time.perf_counter() - started_at
    torch.cuda.synchronize(device)
    return enqueued, time.perf_counter() - started_at


def all_reduce_early(device: torch.device) -> tuple[bool, bool, float]:
    """Call all_reduce on rank 0, and on the other ranks only after rank 0's call has returned.

    Rank 0 signals through a second process group that its call has returned. Each rank adds its
    rank + 1 to the sum. Returns whether the all-reduce was complete when rank 0's call returned,
    whether it is complete on this rank after `wait()`, and the sum. Raises `ValueError` if there is
    only one rank.
    """
    if dist.get_world_size() < 2:
        raise ValueError("all_reduce_early needs at least two processes")
    signal_group: Any = dist.new_group(backend="gloo")
    total = torch.tensor([dist.get_rank() + 1.0], device=device)
    was_completed = torch.zeros(1)
    if dist.get_rank() == 0:
        work = dist.all_reduce(total, async_op=True)
        was_completed[0] = work.is_completed()
    dist.broadcast(was_completed, 0, group=signal_group)
    if dist.get_rank() > 0:
        work = dist.all_reduce(total, async_op=True)
    work.wait()
    number = total.item()  # on a GPU `wait()` blocks only the stream; `item()` waits for the sum
    return bool(was_completed), work.is_completed(), number


def draw(file: Path) -> None:
    """Draw what happens on each rank, in the order that `all_reduce_early` enforces."""
    figure = show.new_figure(4.9, 2.4)
    axes = figure.subplots()
    axes.set(xlim=(-1.5, 9.4), ylim=(-1.0, 2.0))
    axes.axis("off")
    events = [  # (start, end, rank, color, label)
        (0, 2.1, 0, 0, "call\nall_reduce"),
        (2.3, 6.3, 0, 1, "signal, then\nother work"),
        (4.0, 6.1, 1, 0, "call\nall_reduce"),
        (6.5, 9.2, 0, 3, "wait():\nthe sum"),
        (6.5, 9.2, 1, 3, "wait():\nthe sum"),
    ]
    for start, end, rank, color, label in events:
        place, style = 1.5 * (1 - rank), {"color": show.COLORS[color], "alpha": 0.35}
        axes.barh(place, end - start, 0.8, start, **style)
        axes.text((start + end) / 2, place, label, ha="center", va="center", fontsize=10)
    for rank in (0, 1):
        axes.text(-1.5, 1.5 * (1 - rank), f"rank {rank}", va="center", fontsize=10)
    arrow = {"arrowstyle": "->", "color": "#555555"}
    axes.annotate("", (4.3, 0.42), (2.5, 1.08), arrowprops=arrow)
    axes.text(3.2, 0.7, "signal", ha="right", va="center", fontsize=10, color="#555555")
    axes.annotate("", (9.3, -0.6), (0, -0.6), arrowprops=arrow)
    axes.text(4.6, -0.7, "order in time", ha="center", va="top", fontsize=10, color="#555555")
    show.save(figure, file)


def main(device: torch.device, options) -> None:
    was_completed, is_completed, total = all_reduce_early(device)
    if dist.get_rank() > 0:
        return
    head = ["on rank 0", "the other ranks", "`is_completed()`", "the tensor"]
    early = ["the call has returned", "have not called it", was_completed, "must not be read yet"]
    late = ["`wait()` has returned", "have joined", is_completed, total]
    print(show.table(head, [early, late]))
    if device.type == "cuda":
        enqueued, done = time_enqueued(device)
        print(f"\nten products: called in {duration(enqueued)}, done in {duration(done)}")
    if options.plot:
        draw(options.plot)


if __name__ == "__main__":
    with one_line_errors():
        options = Parser(__doc__, plot=True, processes=2, least=2).parse_args()
        run_in_group(main, options.processes, options)
