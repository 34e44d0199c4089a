"""Grade exercise 21: call reduce_scatter on 2 to 4 ranks, and check the sums and the messages."""

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grading
from grading import STUCK_SENDING, Wrong, dist, grade, import_answer, prefixed, torch

GROUP_SIZES = (2, 3, 4)
LENGTHS = (12, 7, 2)  # tensor lengths that lead to equal, unequal and empty chunks
BASE = 1000  # digit r of a sum in this base comes from rank r's values
RIGHT = (
    "on 2, 3 and 4 ranks, each rank has the sum of its chunk and has sent N − 1 chunks to the right"
)
BYTES = "How many bytes each rank sends"


def values_of(rank: int, length: int) -> list[int]:
    """Return the numbers from 1 to `length`, in a random order that is fixed for each rank."""
    return random.Random(10 * length + rank).sample(range(1, length + 1), length)


def observe(answer: Path, device) -> Iterator[dict]:
    """Call the answer. The values of rank r are BASE**r times `values_of(r, length)`."""
    from accel_demo.anatomy.ring import split
    from accel_demo.anatomy.wire import Wire
    from accel_demo.processes.connect import gather_objects

    module = import_answer(answer)
    for number, length in enumerate(LENGTHS):
        rank = dist.get_rank()
        values = torch.tensor(values_of(rank, length), dtype=torch.float64, device=device)
        values *= BASE**rank
        chunks, wire = split(values, dist.get_world_size()), Wire()
        passed = list(chunks)
        grading.call_without_collectives(module.reduce_scatter, passed, wire)
        dist.barrier()
        observation = {
            "chunks": [chunk.tolist() for chunk in split(values, dist.get_world_size())],
            "has_new_tensors": any(
                one is not other for one, other in zip(passed, chunks, strict=False)
            ),
            "sent": [(message.target, message.size) for message in wire.sent],
        }
        yield observation
        try:
            judge(number, gather_objects(observation))
        except Wrong:
            return  # with chunks of different lengths, the same mistake could crash the processes


@dataclass(frozen=True)
class Call:
    """One rank's chunks and the messages it has sent, after the function has returned."""

    rank: int
    chunks: list[list[float]]
    has_new_tensors: bool  # True if the list contains different tensors than before
    sent: list[tuple[int, int]]  # (target, bytes) of each message

    @property
    def sent_bytes(self) -> int:
        return sum(size for _, size in self.sent)

    @property
    def byte_limit(self) -> int:
        """The number of bytes in all chunks except this rank's."""
        return 8 * (sum(map(len, self.chunks)) - len(self.chunks[self.rank]))

    def counts(self, index: int) -> list[int] | None:
        """Return how often each rank's values are in a chunk, or None if other values are in it."""
        chunk, ranks = self.chunks[index], range(len(self.chunks))
        if not all(0 <= value < BASE ** len(ranks) and value == int(value) for value in chunk):
            return None
        first, length = sum(map(len, self.chunks[:index])), sum(map(len, self.chunks))
        counts = []
        for rank in ranks:
            values = values_of(rank, length)[first : first + len(chunk)]
            added = [int(value) // BASE**rank % BASE for value in chunk]
            counts.append(added[0] // values[0])
            if added != [counts[-1] * value for value in values]:
                return None
        return counts

    def has_sum(self, index: int) -> bool:
        return not self.chunks[index] or self.counts(index) == [1 for _ in self.chunks]


def judge(number: int, seen: list[dict]) -> None:
    calls = [Call(rank, **observation) for rank, observation in enumerate(seen)]
    for check in (check_targets, check_sum, check_bytes):
        for call in calls:
            with prefixed(f"with {LENGTHS[number]} elements, rank {call.rank} "):
                check(call, calls)


def check_targets(call: Call, calls: list[Call]) -> None:
    right, left = (call.rank + 1) % len(calls), (call.rank - 1) % len(calls)
    for target, _ in call.sent:
        if target != right:
            which = "its left neighbor, " if target == left else ""
            raise Wrong(f"has sent to {which}rank {target}, but may send only to rank {right}")


def check_sum(call: Call, calls: list[Call]) -> None:
    """Check that this rank has the sum of its own chunk."""
    own, ranks = call.rank, range(len(calls))
    if call.has_sum(own):
        return
    if call.has_new_tensors:
        raise Wrong("has put new tensors into the list: change the existing tensors in place")
    for index in ranks:
        if call.chunks[index] and call.has_sum(index):
            raise Wrong(f"has the sum of chunk {index}, but needs the sum of chunk {own}")
    counts = call.counts(own)
    if counts is None:
        raise Wrong(
            f"has numbers in chunk {own} that do not belong there: in each step, the sender and "
            "the receiver must use the same chunk"
        )
    if counts == [int(rank == own) for rank in ranks]:
        sent, limit = call.sent_bytes, call.byte_limit
        why = f"although it has sent {sent} bytes: maybe each step sends the same chunk"
        if sent < limit:
            why = f"and has sent {sent} of {limit} bytes: maybe a step is missing"
        raise Wrong(f"has only its own values in chunk {own}, {why}")
    if not counts[own]:
        raise Wrong(f"has lost its own values in chunk {own}: add the received values to them")
    for rank in ranks:
        if counts[rank] > 1:
            raise Wrong(f"has the values of rank {rank} more than once in chunk {own}")
    missing = [str(rank) for rank in ranks if not counts[rank]]
    raise Wrong(
        f"is missing the values of rank{'s' * (len(missing) > 1)} {', '.join(missing)} in chunk "
        f"{own}: each step must send the received values plus the rank's own values"
    )


def check_bytes(call: Call, calls: list[Call]) -> None:
    sent, limit = call.sent_bytes, call.byte_limit
    if sent < limit:
        raise Wrong(f"has sent {sent} of {limit} bytes with `wire`: send every chunk with `wire`")
    if sent == limit:
        return
    if all(one.has_sum(index) for one in calls for index in range(len(calls))):
        why = "this is the complete all-reduce, but only its first half is needed"
    elif all((one.sent_bytes > one.byte_limit) == (one.rank > 0) for one in calls):
        why = "it seems that rank 0 collects everything"
    elif sent == limit + 8 * len(call.chunks[call.rank]):
        why = "maybe there is one step too many"
    else:
        why = f"the size of all chunks except chunk {call.rank}"
    raise Wrong(f"has sent {sent} bytes, but the limit is {limit} bytes: {why}", BYTES)


if __name__ == "__main__":
    options = {"group_sizes": GROUP_SIZES, "judge": judge, "patience": 30, "stuck": STUCK_SENDING}
    sys.exit(grade(__file__, __doc__, observe, right=RIGHT, **options))
