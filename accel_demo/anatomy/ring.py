"""All-reduce in three ways, of messages from one rank to one other: what does each rank send?

python -m accel_demo.anatomy.ring --processes 4
python -m accel_demo.anatomy.ring --processes 4 --plot ring.png

In the formulas N is the number of ranks, and S the size of the tensor in bytes.
"""

import torch
import torch.distributed as dist

from accel_demo.anatomy import traffic
from accel_demo.anatomy.flags import command_line, read
from accel_demo.anatomy.wire import SUMMABLE, Wire
from accel_demo.errors import one_line_errors
from accel_demo.processes.group import run_in_group

ELEMENTS = 1000  # float32 numbers in the tensor of the program


def all_reduce_gather_broadcast(tensor: torch.Tensor, wire: Wire, mean: bool = False) -> None:
    """Replace the tensor by its sum over all ranks, in place: rank 0 adds up for everybody.

    The sum, or the mean, has the same bits on all ranks. A step is one message, because all of
    them pass through rank 0. Raises as `all_reduce_chunked_ring` does.
    """
    total = _agreed("all_reduce_gather_broadcast", tensor, wire, mean)
    others = range(1, wire.world_size)
    if wire.rank > 0:
        wire.send(total, 0, step=wire.rank, what="gather")
        wire.receive(total, 0)
    else:
        received = torch.empty_like(total)
        for other in others:
            wire.receive(received, other)
            total += received
        for other in others:
            wire.send(total, other, step=len(others) + other, what="broadcast")
    _write_back(total, tensor, wire, mean)


def all_reduce_naive_ring(tensor: torch.Tensor, wire: Wire, mean: bool = False) -> None:
    """Replace the tensor by its sum over all ranks, in place: each whole tensor goes around.

    Each rank adds in another order. Of floating-point numbers the sums are close, but with more
    than two ranks they may differ in their last bits. Raises as `all_reduce_chunked_ring` does.
    """
    total = _agreed("all_reduce_naive_ring", tensor, wire, mean)
    right, left = _neighbours(wire)
    outgoing, incoming = total.clone(), torch.empty_like(total)
    for step in range(1, wire.world_size):
        source = (wire.rank + 1 - step) % wire.world_size
        wire.exchange(outgoing, right, incoming, left, step, f"tensor of rank {source}")
        total += incoming
        outgoing, incoming = incoming, outgoing
    _write_back(total, tensor, wire, mean)


def all_reduce_chunked_ring(tensor: torch.Tensor, wire: Wire, mean: bool = False) -> None:
    """Replace the tensor by its sum over all ranks, in place: one chunk for each rank goes around.

    The sum, or the mean, has the same bits on all ranks: each chunk is summed in one order, and
    then copied. Raises `ValueError`, on every rank, where the tensor of one rank cannot be summed
    (it requires grad, or `mean` is asked of whole numbers), or where the ranks do not agree.
    Source: Patarasu and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations,
    2009, https://doi.org/10.1016/j.jpdc.2008.09.002
    """
    total = _agreed("all_reduce_chunked_ring", tensor, wire, mean)
    chunks = split(total, wire.world_size)
    reduce_scatter_ring(chunks, wire)
    all_gather_ring(chunks, wire, first_step=wire.world_size)
    _write_back(total, tensor, wire, mean)


def split(flat: torch.Tensor, world_size: int) -> list[torch.Tensor]:
    """One chunk for each rank, as views; the first ones are longer by one where it does not divide.

    (`torch.chunk` would not do: of 5 elements it makes 3 chunks where 4 are asked for.)
    """
    return list(flat.tensor_split(world_size))


def reduce_scatter_ring(chunks: list[torch.Tensor], wire: Wire, first_step: int = 1) -> None:
    """Sum each chunk over all ranks: rank r ends with the whole sum of chunk r, in place.

    Chunk c sets out from rank c + 1, and every rank it comes to adds its own values.
    """
    right, left = _neighbours(wire)
    received = torch.empty_like(chunks[0])  # no chunk is longer
    for step in range(wire.world_size - 1):
        out, into = (wire.rank - 1 - step) % len(chunks), (wire.rank - 2 - step) % len(chunks)
        arriving = received[: len(chunks[into])]
        wire.exchange(chunks[out], right, arriving, left, first_step + step, f"chunk {out}")
        chunks[into] += arriving


def all_gather_ring(chunks: list[torch.Tensor], wire: Wire, first_step: int = 1) -> None:
    """Copy chunk r of rank r, for each r, to all ranks, in place."""
    right, left = _neighbours(wire)
    for step in range(wire.world_size - 1):
        out, into = (wire.rank - step) % len(chunks), (wire.rank - 1 - step) % len(chunks)
        wire.exchange(chunks[out], right, chunks[into], left, first_step + step, f"chunk {out}")


ALGORITHMS = {
    "gather + broadcast": all_reduce_gather_broadcast,
    "naive ring": all_reduce_naive_ring,
    "chunked ring": all_reduce_chunked_ring,
}


def _neighbours(wire: Wire) -> tuple[int, int]:
    """The ranks to the right, to which a ring sends, and to the left, from which it receives."""
    return (wire.rank + 1) % wire.world_size, (wire.rank - 1) % wire.world_size


def _agreed(name: str, tensor: torch.Tensor, wire: Wire, mean: bool) -> torch.Tensor:
    """The tensor as one contiguous row, once all ranks have said that theirs is the same kind.

    It shares the tensor's memory where that is contiguous. To ask costs a round of small messages
    in each call, whatever S is. A library made for speed does not ask, and fails or waits instead.
    """
    same = {"tensor": tensor}
    wire.agree(name, same, same, _mistake(tensor, mean), mean=mean)
    return tensor.detach().contiguous().view(-1)


def _mistake(tensor: torch.Tensor, mean: bool) -> str:
    """What is wrong with this rank's tensor, or nothing."""
    if not isinstance(tensor, torch.Tensor):
        return ""  # `agree` says so
    if tensor.dtype not in SUMMABLE:
        return f"tensor must hold real numbers that can be added up, got {tensor.dtype}"
    if mean and not tensor.is_floating_point():
        return f"mean must be False where the tensor holds whole numbers, got {tensor.dtype}"
    return ""


def _write_back(total: torch.Tensor, tensor: torch.Tensor, wire: Wire, mean: bool) -> None:
    if mean:
        total /= wire.world_size
    if not tensor.is_contiguous():
        tensor.copy_(total.view(tensor.shape))


def main(device: torch.device, options) -> None:
    """Run all three on the same tensors, and show what was sent. Whole numbers, so no rounding."""
    world_size = dist.get_world_size()
    mine = torch.arange(ELEMENTS, dtype=torch.float32, device=device) * (dist.get_rank() + 1)
    right = mine.clone()
    dist.all_reduce(right)
    logs, same = {}, []
    for name, all_reduce in ALGORITHMS.items():
        wire, total = Wire(), mine.clone()
        all_reduce(total, wire)
        logs[name] = wire.messages()
        same.append(torch.equal(total, right))
    if dist.get_rank() > 0:
        return
    sizes = traffic.chunk_sizes(ELEMENTS, mine.element_size(), world_size)
    print("What each rank sends in the chunked ring:\n")
    print(traffic.step_table(logs["chunked ring"], world_size))
    print(f"\nBytes, for a tensor of S = {sum(sizes)} bytes on N = {world_size} ranks:\n")
    print(traffic.byte_table(logs, sizes))
    print(f"\n{sum(same)} of {len(same)} give what dist.all_reduce gives.")
    if options.plot:
        traffic.draw(logs, sizes, options.plot)


if __name__ == "__main__":
    with one_line_errors():
        options = read(command_line(__doc__, processes=4))
        run_in_group(main, options.processes, options)
