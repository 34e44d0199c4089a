"""Build the collectives of torch.distributed from send and receive alone.

python -m accel_demo.anatomy.collectives
python -m accel_demo.anatomy.collectives --processes 4 --plot collectives.png

With --plot, the numbers of each collective are drawn instead of printed.

All ranks of the default process group must call the same function. The results are written to the
tensors that the caller passes. Before they send any data, the ranks compare their arguments
(`Wire.agree`). If one rank's arguments are invalid, every rank raises the same `ValueError` instead
of waiting forever.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from accel_demo import show
from accel_demo.anatomy.wire import SUMMABLE, Message, Wire
from accel_demo.errors import UserError, one_line_errors
from accel_demo.options import Parser
from accel_demo.processes.connect import gather_objects
from accel_demo.processes.group import run_in_group

OPERATIONS = {
    "sum": torch.add,
    "mean": torch.add,  # the sum is divided at the end
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}
Parts = list[torch.Tensor]  # one tensor per rank, in rank order
MOST_PROCESSES = 6  # more do not fit into the picture


@dataclass(frozen=True)
class CollectiveExample:
    """Each rank's numbers before and after one collective, and the messages of all ranks."""

    name: str
    before: list[list[int]]
    after: list[list[int]]
    messages: list[Message]


def broadcast(tensor: torch.Tensor, source: int, wire: Wire) -> None:
    """Copy the tensor of rank `source` to all ranks, along a binomial tree.

    In each round, every rank that has the tensor sends it to a rank that does not have it, so the
    number of ranks with the tensor doubles.
    """
    sent = {"tensor": tensor} if wire.rank == source else {}
    wire.agree("broadcast", sent, {"tensor": tensor}, source=source)
    _pass_down_a_tree(tensor, source, wire)


def scatter(tensor: torch.Tensor, parts: Parts | None, source: int, wire: Wire) -> None:
    """Send `parts[r]` from rank `source` to each rank r, one part at a time.

    The parts may have different shapes. Only rank `source` uses `parts`.
    """
    sent = {"parts": parts} if wire.rank == source else {}
    wire.agree("scatter", sent, {"tensor": tensor}, source=source)
    if wire.rank != source:
        wire.receive(tensor, source)
        return
    assert parts is not None  # `agree` has checked this
    for turn in range(1, wire.world_size):
        target = (source + turn) % wire.world_size
        wire.send(parts[target], target, step=turn - 1)
    tensor.copy_(parts[source].detach())


def gather(tensor: torch.Tensor, parts: Parts | None, target: int, wire: Wire) -> None:
    """Copy the tensor of each rank r to `parts[r]` on rank `target`: the reverse of `scatter`."""
    received = {"parts": parts} if wire.rank == target else {}
    wire.agree("gather", {"tensor": tensor}, received, target=target)
    _collect(tensor, parts, target, wire)


def all_gather(parts: Parts, tensor: torch.Tensor, wire: Wire) -> None:
    """Copy the tensor of each rank r to `parts[r]` on all ranks, using pairwise exchanges."""
    wire.agree("all_gather", {"tensor": tensor}, {"parts": parts})
    _exchange_in_pairs(parts, [tensor] * wire.world_size, wire)


def all_to_all(received: Parts, parts: Parts, wire: Wire) -> None:
    """Copy `parts[r]` from each rank s to `received[s]` on rank r, using pairwise exchanges."""
    wire.agree("all_to_all", {"parts": parts}, {"received": received})
    _exchange_in_pairs(received, parts, wire)


def reduce(tensor: torch.Tensor, target: int, wire: Wire, operation: str = "sum") -> None:
    """Replace the tensor on rank `target` by the sum, mean, product, max or min over all ranks.

    Rank `target` receives all tensors and then combines them. Unlike PyTorch, this function
    guarantees that the tensors on the other ranks do not change. The max or min of NaN and a number
    is NaN, as in `torch.maximum`. gloo returns one of the two values, depending on their order.
    """
    received = {"tensor": tensor} if wire.rank == target else {}
    mistake = _operation_mistake(operation, tensor)
    wire.agree("reduce", {"tensor": tensor}, received, mistake, target=target, operation=operation)
    _collect_and_combine(tensor, target, wire, operation)


def reduce_scatter(tensor: torch.Tensor, parts: Parts, wire: Wire, operation: str = "sum") -> None:
    """Reduce `parts[r]` over all ranks, by default to the sum, into rank r's `tensor`.

    The ranks exchange their parts as in `all_to_all`. Then each rank combines the parts that it
    received.
    """
    mistake = _operation_mistake(operation, tensor)
    wire.agree("reduce_scatter", {"parts": parts}, {"tensor": tensor}, mistake, operation=operation)
    received = [torch.empty_like(tensor) for _ in parts]
    _exchange_in_pairs(received, parts, wire)
    tensor.copy_(_combine(received, operation))


def all_reduce(tensor: torch.Tensor, wire: Wire, operation: str = "sum") -> None:
    """Replace each rank's tensor by the sum, mean, product, max or min over all ranks.

    The tensors are reduced to rank 0, and the result is broadcast. This is the simplest algorithm,
    but libraries avoid it: rank 0 does most of the work, and its work grows with the number of
    ranks. The ring on page 21 splits the work equally.
    """
    same, mistake = {"tensor": tensor}, _operation_mistake(operation, tensor)
    wire.agree("all_reduce", same, same, mistake, operation=operation)
    _collect_and_combine(tensor, 0, wire, operation)
    _pass_down_a_tree(tensor, 0, wire, first_step=wire.world_size - 1)


def _pass_down_a_tree(tensor: torch.Tensor, source: int, wire: Wire, first_step: int = 0) -> None:
    place = (wire.rank - source) % wire.world_size  # `source` has place 0, the root of the tree
    have_it, step = 1, first_step  # `have_it`: how many ranks have the tensor
    while have_it < wire.world_size:
        if place < have_it and place + have_it < wire.world_size:
            wire.send(tensor, (wire.rank + have_it) % wire.world_size, step)
        elif have_it <= place < 2 * have_it:
            wire.receive(tensor, (wire.rank - have_it) % wire.world_size)
        have_it, step = 2 * have_it, step + 1


def _collect(tensor: torch.Tensor, parts: Parts | None, target: int, wire: Wire) -> None:
    if wire.rank != target:
        wire.send(tensor, target, step=(wire.rank - target) % wire.world_size - 1)
        return
    assert parts is not None  # `agree` has checked this
    for turn in range(1, wire.world_size):
        source = (target + turn) % wire.world_size
        wire.receive(parts[source], source)
    parts[target].copy_(tensor.detach())


def _exchange_in_pairs(received: Parts, parts: Parts, wire: Wire) -> None:
    """In round d, send to rank + d and receive from rank − d, modulo the number of ranks."""
    for distance in range(wire.world_size):  # at distance 0, a rank copies its own part
        target = (wire.rank + distance) % wire.world_size
        source = (wire.rank - distance) % wire.world_size
        wire.exchange(parts[target], target, received[source], source, step=distance - 1)


def _collect_and_combine(tensor: torch.Tensor, target: int, wire: Wire, operation: str) -> None:
    parts = [torch.empty_like(tensor) for _ in range(wire.world_size)]
    _collect(tensor, parts, target, wire)
    if wire.rank == target:
        tensor.copy_(_combine(parts, operation))


def _combine(parts: Parts, operation: str) -> torch.Tensor:
    """Combine the parts in rank order, because floating-point sums depend on the order."""
    total = functools.reduce(OPERATIONS[operation], parts)
    return total / len(parts) if operation == "mean" else total


def _operation_mistake(operation: str, tensor: torch.Tensor) -> str:
    """Return an error message if the operation is invalid for the tensor, else an empty string."""
    if not isinstance(operation, str) or operation not in OPERATIONS:
        return f"operation must be one of {', '.join(OPERATIONS)}, got {operation!r}"
    if not isinstance(tensor, torch.Tensor):
        return ""  # `agree` reports that the argument is not a tensor
    is_mean_of_integers = operation == "mean" and not tensor.is_floating_point()
    if is_mean_of_integers or tensor.dtype not in SUMMABLE | {torch.bool}:
        return f"operation {operation} is not defined for {tensor.dtype}"
    return ""


def main(device: torch.device, options) -> None:
    if dist.get_world_size() > MOST_PROCESSES:
        raise UserError(f"the picture has room for only {MOST_PROCESSES} processes. Start fewer.")
    examples = list(_examples(device))
    if dist.get_rank() > 0:
        return
    if options.plot:
        draw(examples, options.plot)
    else:
        print(number_table(examples), end="\n\n")
    head = ["collective", "messages", "rounds", "bytes in total", "busiest rank sends"]
    counts = []
    for example in examples:
        log = example.messages
        rounds = len({message.step for message in log})
        counts.append([example.name, len(log), rounds, *bytes_sent(log)])
    print(show.table(head, counts))


def number_table(examples: list[CollectiveExample]) -> str:
    """Return a table of each rank's numbers before and after each collective."""
    rows = [
        [example.name, rank, *(" ".join(map(str, numbers)) or "·" for numbers in before_and_after)]
        for example in examples
        for rank, before_and_after in enumerate(zip(example.before, example.after, strict=True))
    ]
    return show.table(["collective", "rank", "before", "after"], rows)


def bytes_sent(messages: list[Message]) -> tuple[int, int]:
    """Return the bytes that all ranks send, and the bytes of the rank that sends the most."""
    ranks = range(dist.get_world_size())
    by_rank = [sum(m.size for m in messages if m.source == rank) for rank in ranks]
    return sum(by_rank), max(by_rank)


def _examples(device: torch.device) -> Iterator[CollectiveExample]:
    """Run each collective on small tensors, and yield a `CollectiveExample` for each.

    On N ranks, rank r multiplies the numbers 1, 2, … N by 10**r to get its row, so that the
    position of a digit shows which rank it came from. The input of each collective is this row, the
    first number of the row, or nothing.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    row = torch.arange(1, world_size + 1, device=device) * 10**rank
    parts, first, nothing = list(row.split(1)), row[:1], row[:0]

    empty_row, empty = torch.zeros_like(row), torch.zeros_like(first)
    examples = [  # (collective, input on this rank, output, arguments)
        (broadcast, row, row.clone(), lambda out: (out, 0)),
        (scatter, row if rank == 0 else nothing, empty.clone(), lambda out: (out, parts, 0)),
        (gather, first, empty_row.clone(), lambda out: (first, list(out.split(1)), 0)),
        (all_gather, first, empty_row.clone(), lambda out: (list(out.split(1)), first)),
        (reduce, row, row.clone(), lambda out: (out, 0)),
        (reduce_scatter, row, empty.clone(), lambda out: (out, parts)),
        (all_reduce, row, row.clone(), lambda out: (out,)),
        (all_to_all, row, empty_row.clone(), lambda out: (list(out.split(1)), parts)),
    ]
    for collective, before, out, arguments in examples:  # `split` returns views of the output
        wire = Wire()
        collective(*arguments(out), wire)
        after = nothing if collective is gather and rank > 0 else out
        numbers = gather_objects(before.tolist()), gather_objects(after.tolist())
        yield CollectiveExample(collective.__name__, *numbers, wire.messages())


def draw(examples: list[CollectiveExample], path: Path) -> None:
    """Draw the data before and after each collective: one row per rank, colored by source rank."""
    world_size = len(examples[0].before)
    cell = max(0.42, 0.15 + 0.09 * world_size)  # inches
    width, height = 2 * world_size + 2.6, world_size + 0.4 / cell
    figure = show.new_figure(2 * width * cell, 4 * height * cell)
    for axes, example in zip(figure.subplots(4, 2).flat, examples, strict=True):
        for rank in range(world_size):
            axes.text(-0.2, rank + 0.5, f"rank {rank}", ha="right", va="center", fontsize=9)
            for left, by_rank in ((0, example.before), (world_size + 1, example.after)):
                for column, number in enumerate(by_rank[rank]):
                    _draw_cell(axes, left + column, rank, number)
        axes.text(world_size + 0.5, world_size / 2, "→", ha="center", va="center", fontsize=16)
        axes.set_title(example.name, fontsize=12, loc="left")
        axes.set(xlim=(-1.6, 2 * world_size + 1), ylim=(world_size, 0), aspect="equal")
        axes.axis("off")
    show.save(figure, path)


def _draw_cell(axes, left: int, top: int, number: int) -> None:
    """Draw a number in a square, with a stripe for each rank that contributed to the number."""
    parts = [rank for rank, digit in enumerate(reversed(str(number))) if digit != "0"]
    for index, rank in enumerate(parts):
        width, color = 1 / len(parts), show.COLORS[rank]
        axes.bar(left + index * width, 1, width, top, align="edge", color=color, alpha=0.5)
    axes.bar(left, 1, 1, top, align="edge", fill=False, edgecolor="white", linewidth=2)
    axes.text(left + 0.5, top + 0.5, str(number), ha="center", va="center", fontsize=9)


if __name__ == "__main__":
    with one_line_errors():
        options = Parser(__doc__, plot=True, processes=3).parse_args()
        run_in_group(main, options.processes, options)
