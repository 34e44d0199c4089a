"""Build all-reduce from messages, using three algorithms, and count the bytes that each rank sends.

python -m accel_demo.anatomy.ring --processes 4
python -m accel_demo.anatomy.ring --processes 4 --plot ring.png

In the formulas, N is the number of ranks and S is the size of the tensor in bytes. With --plot, the
steps of the chunked ring are drawn instead of printed.
"""

import torch
import torch.distributed as dist

from accel_demo.anatomy import traffic
from accel_demo.anatomy.wire import SUMMABLE, Wire
from accel_demo.errors import one_line_errors
from accel_demo.guess import comparison
from accel_demo.options import Parser
from accel_demo.processes.group import run_in_group

ELEMENTS = 1000  # number of float32 elements in the example tensor


def all_reduce_gather_broadcast(tensor: torch.Tensor, wire: Wire, mean: bool = False) -> None:
    """Sum a tensor over all ranks in place: rank 0 adds all tensors and sends the sum to each rank.

    The result has the same bits on all ranks. If `mean` is True, the result is the mean. Each step
    has only one message, because every message is from or to rank 0. Raises the same errors as
    `all_reduce_chunked_ring`.
    """
    total = _check_and_flatten("all_reduce_gather_broadcast", tensor, wire, mean)
    others = range(1, wire.world_size)
    if wire.rank > 0:
        wire.send(total, 0, step=wire.rank, label="gather")
        wire.receive(total, 0)
    else:
        received = torch.empty_like(total)
        for other in others:
            wire.receive(received, other)
            total += received
        for other in others:
            wire.send(total, other, step=len(others) + other, label="broadcast")
    _write_back(total, tensor, wire, mean)


def all_reduce_naive_ring(tensor: torch.Tensor, wire: Wire, mean: bool = False) -> None:
    """Sum a tensor over all ranks in place: whole tensors travel around the ring.

    Each rank adds the tensors in a different order. So on more than two ranks, the ranks'
    floating-point results may differ in their last bits. Raises the same errors as
    `all_reduce_chunked_ring`.
    """
    total = _check_and_flatten("all_reduce_naive_ring", tensor, wire, mean)
    right, left = _neighbors(wire)
    outgoing, incoming = total.clone(), torch.empty_like(total)
    for step in range(1, wire.world_size):
        source = (wire.rank + 1 - step) % wire.world_size
        wire.exchange(outgoing, right, incoming, left, step, f"tensor of rank {source}")
        total += incoming
        outgoing, incoming = incoming, outgoing
    _write_back(total, tensor, wire, mean)


def all_reduce_chunked_ring(tensor: torch.Tensor, wire: Wire, mean: bool = False) -> None:
    """Sum a tensor over all ranks in place: sum chunks around the ring, then copy the sums.

    The result has the same bits on all ranks, because each chunk is summed only once. Raises
    `ValueError` on every rank if a tensor requires grad, if `mean` is True for integer tensors,
    or if the tensors differ in shape or dtype.
    Source: Patarasu and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations,
    2009, https://doi.org/10.1016/j.jpdc.2008.09.002
    """
    total = _check_and_flatten("all_reduce_chunked_ring", tensor, wire, mean)
    chunks = split(total, wire.world_size)
    reduce_scatter_ring(chunks, wire)
    all_gather_ring(chunks, wire, first_step=wire.world_size)
    _write_back(total, tensor, wire, mean)


def split(flat: torch.Tensor, world_size: int) -> list[torch.Tensor]:
    """Return one chunk per rank, as views. The first chunks may be one element longer.

    `torch.chunk` may return fewer chunks: it splits 5 elements into 3 chunks if asked for 4.
    """
    return list(flat.tensor_split(world_size))


def reduce_scatter_ring(chunks: list[torch.Tensor], wire: Wire, first_step: int = 1) -> None:
    """Sum each chunk r over all ranks, in place on rank r.

    Chunk r starts on rank r + 1 and travels around the ring. Each rank that receives the chunk adds
    its own values. Rank r is the last.
    """
    right, left = _neighbors(wire)
    received = torch.empty_like(chunks[0])  # as long as the longest chunk
    for step in range(wire.world_size - 1):
        out, into = (wire.rank - 1 - step) % len(chunks), (wire.rank - 2 - step) % len(chunks)
        arriving = received[: len(chunks[into])]
        wire.exchange(chunks[out], right, arriving, left, first_step + step, f"chunk {out}")
        chunks[into] += arriving


def all_gather_ring(chunks: list[torch.Tensor], wire: Wire, first_step: int = 1) -> None:
    """Copy chunk r of each rank r to all ranks, in place."""
    right, left = _neighbors(wire)
    for step in range(wire.world_size - 1):
        out, into = (wire.rank - step) % len(chunks), (wire.rank - 1 - step) % len(chunks)
        wire.exchange(chunks[out], right, chunks[into], left, first_step + step, f"chunk {out}")


ALGORITHMS = {
    "gather + broadcast": all_reduce_gather_broadcast,
    "naive ring": all_reduce_naive_ring,
    "chunked ring": all_reduce_chunked_ring,
}


def _neighbors(wire: Wire) -> tuple[int, int]:
    """Return the rank to which this rank sends, and the rank from which it receives."""
    return (wire.rank + 1) % wire.world_size, (wire.rank - 1) % wire.world_size


def _check_and_flatten(name: str, tensor: torch.Tensor, wire: Wire, mean: bool) -> torch.Tensor:
    """Check that the tensors of all ranks match, and return this rank's tensor flattened.

    The result is contiguous. If the tensor itself is contiguous, the result shares its memory. The
    check costs a round of small messages per call. Fast libraries omit the check, and fail or hang
    if the tensors do not match.
    """
    same = {"tensor": tensor}
    wire.agree(name, same, same, _mistake(tensor, mean), mean=mean)
    return tensor.detach().contiguous().view(-1)


def _mistake(tensor: torch.Tensor, mean: bool) -> str:
    """Return an error message if this rank's tensor is invalid, else an empty string."""
    if not isinstance(tensor, torch.Tensor):
        return ""  # `agree` reports that the argument is not a tensor
    if tensor.dtype not in SUMMABLE:
        return f"tensor must hold real numbers that can be added up, got {tensor.dtype}"
    if mean and not tensor.is_floating_point():
        return f"mean must be False if the tensor holds integers, got {tensor.dtype}"
    return ""


def _write_back(total: torch.Tensor, tensor: torch.Tensor, wire: Wire, mean: bool) -> None:
    if mean:
        total /= wire.world_size
    if not tensor.is_contiguous():
        tensor.copy_(total.view(tensor.shape))


def main(device: torch.device, options) -> None:
    """Run all three algorithms on integers, whose sums are exact, and print what each rank sent."""
    world_size = dist.get_world_size()
    tensor = torch.arange(ELEMENTS, dtype=torch.float32, device=device) * (dist.get_rank() + 1)
    right = tensor.clone()
    dist.all_reduce(right)
    logs, are_right = {}, []
    for name, all_reduce in ALGORITHMS.items():
        wire, total = Wire(), tensor.clone()
        all_reduce(total, wire)
        logs[name] = wire.messages()
        are_right.append(torch.equal(total, right))
    if dist.get_rank() > 0:
        return
    sizes = traffic.chunk_sizes(ELEMENTS, tensor.element_size(), world_size)
    if options.plot:
        traffic.draw(logs["chunked ring"], world_size, options.plot)
    else:
        print("What each rank sends in the chunked ring:\n")
        print(traffic.step_table(logs["chunked ring"], world_size), end="\n\n")
    tensor_size = f"S = {sum(sizes)} bytes on N = {world_size} ranks"
    print(f"Bytes that each rank sends, for a tensor of {tensor_size}:\n")
    print(traffic.byte_table(logs, sizes))
    print(f"\n{sum(are_right)} of {len(are_right)} have the same result as dist.all_reduce.")
    if options.guess is not None:
        sent, _ = traffic.bytes_sent_and_received(logs["chunked ring"], rank=0)
        print(comparison(options.guess, sent, " bytes"))


if __name__ == "__main__":
    with one_line_errors():
        parser = Parser(__doc__, plot=True, processes=4)
        parser.add_guess("bytes that rank 0 sends in the chunked ring")
        options = parser.parse_args()
        run_in_group(main, options.processes, options)
