"""Grade exercise 21: call all_gather on 2, 3 and 4 ranks, and check the sums and the messages.

python tutorials/exercises/graders/21.py FILE
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from accel_demo.lab.grading import Wrong, grade, import_answer

GROUP_SIZES = (2, 3, 4)
LENGTHS = (12, 7, 2)  # tensor lengths that lead to equal, unequal and empty chunks
RIGHT = "on 2, 3 and 4 ranks every rank has all sums, and no rank has sent too many bytes"


def observe(answer: Path, device) -> Iterator[dict]:
    """Call the answer. Element i of rank r is 2**r * (i + 1), so each sum reveals its ranks."""
    import torch
    import torch.distributed as dist

    from accel_demo.anatomy.ring import reduce_scatter_ring, split
    from accel_demo.anatomy.wire import Wire

    module = import_answer(answer)
    for length in LENGTHS:
        values = torch.arange(1, length + 1, dtype=torch.float64, device=device)
        values *= 2 ** dist.get_rank()
        chunks, wire = split(values, dist.get_world_size()), Wire()
        reduce_scatter_ring(chunks, Wire())
        module.all_gather(chunks, wire)
        dist.barrier()
        yield {
            "chunks": [chunk.tolist() for chunk in split(values, dist.get_world_size())],
            "sent": [(message.target, message.size) for message in wire.sent],
        }


def judge(number: int, calls: list[dict]) -> None:
    for check in (check_sums, check_messages):
        for rank, call in enumerate(calls):
            try:
                check(rank, len(calls), **call)
            except Wrong as mistake:
                raise Wrong(f"with {LENGTHS[number]} elements, rank {rank} {mistake}") from None


def check_sums(rank: int, group_size: int, chunks: list[list[float]], sent: list) -> None:
    total, first = 2**group_size - 1, 0  # sum of element 0 over all ranks; start of the chunk
    for index, chunk in enumerate(chunks):
        factors = {value / (first + offset + 1) for offset, value in enumerate(chunk)}
        first += len(chunk)
        if factors <= {total}:
            continue
        factor = factors.pop()
        if not factors and factor < total and factor == int(factor):
            missing = [str(rank) for rank in range(group_size) if not int(factor) >> rank & 1]
            raise Wrong(
                f"has chunk {index} without the values of rank {', '.join(missing)}: in each step "
                "send the chunk that arrived in the previous step"
            )
        if not factors and factor > total:
            raise Wrong(f"has added values twice in chunk {index}: copy the received chunk instead")
        for other in range(group_size):
            start = sum(map(len, chunks[:other]))
            if chunk == [total * (start + offset + 1) for offset in range(len(chunk))]:
                raise Wrong(f"has the sum of chunk {other} instead of chunk {index}")
        raise Wrong(f"has incorrect numbers in chunk {index}: {chunk}")


def check_messages(rank: int, group_size: int, chunks: list[list[float]], sent: list) -> None:
    right = (rank + 1) % group_size
    for target, _ in sent:
        if target != right:
            raise Wrong(f"has sent to rank {target}: in a ring it sends to rank {right} alone")
    sent_bytes = sum(size for _, size in sent)
    sizes = [8 * len(chunk) for chunk in chunks]
    budget = sum(sizes) - sizes[right]  # all chunks except the one that rank `right` already has
    if sent_bytes > budget:
        raise Wrong(
            f"has sent too many bytes: {sent_bytes}, but the limit for N − 1 = "
            f"{group_size - 1} chunks is {budget}"
        )
    if sent_bytes < budget:
        raise Wrong(f"has sent {sent_bytes} of {budget} bytes over the wire: send all data over it")


if __name__ == "__main__":
    options = {"group_sizes": GROUP_SIZES, "judge": judge, "patience": 30}
    sys.exit(grade(__file__, __doc__, observe, right=RIGHT, **options))
