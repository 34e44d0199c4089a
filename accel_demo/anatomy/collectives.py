"""What torch.distributed's collectives move, told with nothing but send and receive.

python -m accel_demo.anatomy.collectives
python -m accel_demo.anatomy.collectives --processes 4 --plot collectives.png

All ranks call the same function, in the default process group. What receives is overwritten in
place. Before anything is sent the ranks compare what each is about to do (`wire.agree`): a mistake
of one is a `ValueError` on all of them, and nobody waits for ever.
"""

import functools
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from accel_demo import show
from accel_demo.anatomy.flags import command_line, read
from accel_demo.anatomy.wire import SUMMABLE, Message, Wire
from accel_demo.errors import UserError, one_line_errors
from accel_demo.processes.connect import gather_objects
from accel_demo.processes.group import run_in_group

OPERATIONS = {
    "sum": torch.add,
    "mean": torch.add,  # and a division at the end
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}
Parts = list[torch.Tensor]  # one for each rank, in order
REDUCIBLE = SUMMABLE | {torch.bool, torch.complex64, torch.complex128}
MOST_PROCESSES = 6  # that the picture has room for


def broadcast(tensor: torch.Tensor, source: int, wire: Wire) -> None:
    """Everyone gets the tensor of rank `source`, along a binomial tree.

    Whoever has it passes it on, so that after each round twice as many have it.
    """
    given = {"tensor": tensor} if wire.rank == source else {}
    wire.agree("broadcast", given, {"tensor": tensor}, source=source)
    _pass_down_a_tree(tensor, source, wire)


def scatter(tensor: torch.Tensor, parts: Parts | None, source: int, wire: Wire) -> None:
    """Rank r gets `parts[r]` of rank `source`, which sends one after the other.

    The parts may differ in shape. On the other ranks `parts` is not looked at.
    """
    given = {"parts": parts} if wire.rank == source else {}
    wire.agree("scatter", given, {"tensor": tensor}, source=source)
    if wire.rank != source:
        wire.receive(tensor, source)
        return
    assert parts is not None  # `agree` has looked
    for turn in range(1, wire.world_size):
        target = (source + turn) % wire.world_size
        wire.send(parts[target], target, step=turn - 1)
    tensor.copy_(parts[source].detach())


def gather(tensor: torch.Tensor, parts: Parts | None, target: int, wire: Wire) -> None:
    """Rank `target` gets the tensor of rank r in `parts[r]`: `scatter` the other way around."""
    gotten = {"parts": parts} if wire.rank == target else {}
    wire.agree("gather", {"tensor": tensor}, gotten, target=target)
    _collect(tensor, parts, target, wire)


def all_gather(parts: Parts, tensor: torch.Tensor, wire: Wire) -> None:
    """Everyone gets the tensor of rank r in `parts[r]`: every two ranks exchange theirs."""
    wire.agree("all_gather", {"tensor": tensor}, {"parts": parts})
    _exchange_in_pairs(parts, [tensor] * wire.world_size, wire)


def all_to_all(received: Parts, parts: Parts, wire: Wire) -> None:
    """Rank r gets `parts[r]` of everyone, in `received`: every two ranks exchange."""
    wire.agree("all_to_all", {"parts": parts}, {"received": received})
    _exchange_in_pairs(received, parts, wire)


def reduce(tensor: torch.Tensor, target: int, wire: Wire, operation: str = "sum") -> None:
    """Rank `target` gets the sum, mean, product, max or min over all ranks: gather, then combine.

    Nobody else's tensor changes. (PyTorch does not promise that.) The max or min of a NaN and a
    number is NaN, as of `torch.maximum`; gloo gives one or the other, by which comes first.
    """
    gotten = {"tensor": tensor} if wire.rank == target else {}
    mistake = _not_defined(operation, tensor)
    wire.agree("reduce", {"tensor": tensor}, gotten, mistake, target=target, operation=operation)
    _collect_and_combine(tensor, target, wire, operation)


def reduce_scatter(tensor: torch.Tensor, parts: Parts, wire: Wire, operation: str = "sum") -> None:
    """Rank r gets the sum, mean … of everyone's `parts[r]`: all_to_all, then combine."""
    mistake = _not_defined(operation, tensor)
    wire.agree("reduce_scatter", {"parts": parts}, {"tensor": tensor}, mistake, operation=operation)
    received = [torch.empty_like(tensor) for _ in parts]
    _exchange_in_pairs(received, parts, wire)
    tensor.copy_(_combine(received, operation))


def all_reduce(tensor: torch.Tensor, wire: Wire, operation: str = "sum") -> None:
    """Everyone gets the sum, mean …: a reduce to rank 0, then a broadcast from there.

    The shortest way to tell it, and not the one used: rank 0 has the most to do, and more with
    every rank. Page 05 shows the ring, which shares the work out.
    """
    same, mistake = {"tensor": tensor}, _not_defined(operation, tensor)
    wire.agree("all_reduce", same, same, mistake, operation=operation)
    _collect_and_combine(tensor, 0, wire, operation)
    _pass_down_a_tree(tensor, 0, wire, first_step=wire.world_size - 1)


def _pass_down_a_tree(tensor: torch.Tensor, source: int, wire: Wire, first_step: int = 0) -> None:
    place = (wire.rank - source) % wire.world_size  # the source's own is 0
    have_it, step = 1, first_step
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
    assert parts is not None  # `agree` has looked
    for turn in range(1, wire.world_size):
        source = (target + turn) % wire.world_size
        wire.receive(parts[source], source)
    parts[target].copy_(tensor.detach())


def _exchange_in_pairs(received: Parts, parts: Parts, wire: Wire) -> None:
    """In each round, give to the rank so many places on, and take from the one as many back."""
    for distance in range(wire.world_size):  # 0: what a rank keeps for itself, no message
        target = (wire.rank + distance) % wire.world_size
        source = (wire.rank - distance) % wire.world_size
        wire.exchange(parts[target], target, received[source], source, step=distance - 1)


def _collect_and_combine(tensor: torch.Tensor, target: int, wire: Wire, operation: str) -> None:
    parts = [torch.empty_like(tensor) for _ in range(wire.world_size)]
    _collect(tensor, parts, target, wire)
    if wire.rank == target:
        tensor.copy_(_combine(parts, operation))


def _combine(parts: Parts, operation: str) -> torch.Tensor:
    """In the order of the ranks, whoever does it: floating-point sums depend on the order."""
    total = functools.reduce(OPERATIONS[operation], parts)
    return total / len(parts) if operation == "mean" else total


def _not_defined(operation: str, tensor: torch.Tensor) -> str:
    if not isinstance(operation, str) or operation not in OPERATIONS:
        return f"operation must be one of {', '.join(OPERATIONS)}, got {operation!r}"
    if not isinstance(tensor, torch.Tensor):
        return ""  # `agree` says so
    dtype = tensor.dtype
    is_whole = not (dtype.is_floating_point or dtype.is_complex)
    is_ordered = operation in ("max", "min")
    is_missing = (operation == "mean" and is_whole) or (is_ordered and dtype.is_complex)
    if is_missing or dtype not in REDUCIBLE:
        return f"operation {operation} is not defined for {dtype}"
    return ""


def main(device: torch.device, options) -> None:
    if dist.get_world_size() > MOST_PROCESSES:
        raise UserError(f"the picture has room for {MOST_PROCESSES} processes: ask for fewer")
    examples, counts = [], []
    for name, before, after, wire in _examples(device):
        messages = wire.messages()
        shown = gather_objects((before.tolist(), after.tolist()))
        examples.append((name, shown))
        rounds = len({message.step for message in messages})
        counts.append([name, len(messages), rounds, *bytes_moved(messages)])
    if dist.get_rank() == 0:
        rows = [
            [name, rank, *(" ".join(map(str, row)) or "·" for row in pair)]
            for name, shown in examples
            for rank, pair in enumerate(shown)
        ]
        print(show.table(["collective", "rank", "before", "after"], rows), end="\n\n")
        head = ["collective", "messages", "rounds", "bytes in all", "bytes at the busiest rank"]
        print(show.table(head, counts))
        if options.plot:
            draw(examples, options.plot)


def bytes_moved(messages: list[Message]) -> tuple[int, int]:
    """In all, and in and out of the rank with the most."""
    ranks = range(dist.get_world_size())
    each = [sum(m.size for m in messages if rank in (m.source, m.target)) for rank in ranks]
    return sum(each) // 2, max(each)


def _examples(device: torch.device) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, Wire]]:
    """Each collective's name, what this rank has before and after it, and the wire it used.

    Of N ranks, each has a row of N, 1 or 0 numbers. Rank r starts with 10**r times 1, 2, 3 …, so
    that every number shows whose it is.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    row = torch.arange(1, world_size + 1, device=device) * 10**rank
    parts, one, nothing = list(row.split(1)), row[:1], row[:0]

    def example(collective, before, after, *arguments):
        wire = Wire()
        collective(*arguments, wire)
        return collective.__name__, before, after, wire

    out = row.clone()
    yield example(broadcast, row, out, out, 0)
    out = torch.zeros_like(one)
    yield example(scatter, row if rank == 0 else nothing, out, out, parts, 0)
    out = torch.zeros_like(row)  # its parts are views: what is written to them is in it
    yield example(gather, one, out if rank == 0 else nothing, one, list(out.split(1)), 0)
    out = torch.zeros_like(row)
    yield example(all_gather, one, out, list(out.split(1)), one)
    out = row.clone()
    yield example(reduce, row, out, out, 0)
    out = torch.zeros_like(one)
    yield example(reduce_scatter, row, out, out, parts)
    out = row.clone()
    yield example(all_reduce, row, out, out)
    out = torch.zeros_like(row)
    yield example(all_to_all, row, out, list(out.split(1)), parts)


def draw(examples: list[tuple[str, list[tuple[list[int], list[int]]]]], path: Path) -> None:
    """Before and after of each collective: a line for each rank, colours for whose it was.

    An example is the collective's name, and by rank the numbers it has before and after.
    """
    world_size = len(examples[0][1])
    cell = max(0.42, 0.15 + 0.09 * world_size)  # in inches: more ranks have longer numbers
    width, height = 2 * world_size + 2.6, world_size + 0.4 / cell
    figure = show.new_figure(2 * width * cell, 4 * height * cell)
    for axes, (name, shown) in zip(figure.subplots(4, 2).flat, examples, strict=True):
        for rank, pair in enumerate(shown):
            axes.text(-0.2, rank + 0.5, f"rank {rank}", ha="right", va="center", fontsize=9)
            for left, numbers in zip((0, world_size + 1), pair, strict=True):
                for column, number in enumerate(numbers):
                    _draw_cell(axes, left + column, rank, number)
        axes.text(world_size + 0.5, world_size / 2, "→", ha="center", va="center", fontsize=16)
        axes.set_title(name, fontsize=12, loc="left")
        axes.set(xlim=(-1.6, 2 * world_size + 1), ylim=(world_size, 0), aspect="equal")
        axes.axis("off")
    show.save(figure, path)


def _draw_cell(axes, left: int, top: int, number: int) -> None:
    """A square with a number in it, and a stripe for each rank that had a part in it."""
    parts = [rank for rank, digit in enumerate(reversed(str(number))) if digit != "0"]
    for index, rank in enumerate(parts):
        width, colour = 1 / len(parts), show.COLOURS[rank]
        axes.bar(left + index * width, 1, width, top, align="edge", color=colour, alpha=0.5)
    axes.bar(left, 1, 1, top, align="edge", fill=False, edgecolor="white", linewidth=2)
    axes.text(left + 0.5, top + 0.5, str(number), ha="center", va="center", fontsize=9)


if __name__ == "__main__":
    with one_line_errors():
        options = read(command_line(__doc__, processes=3))
        run_in_group(main, options.processes, options)
