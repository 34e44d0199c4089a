"""Grade exercise 20: call all_reduce on one to four processes, and check which ranks were added."""

import operator
import sys
from collections.abc import Iterator
from pathlib import Path

import grading
from grading import NOT_AWAITED, STUCK_SENDING, Wrong, dist, grade, import_answer, list_ranks, torch

GROUP_SIZES = (1, 2, 3, 4)
# A small and a large tensor: isend returns long before it has sent the large one.
SHAPES = [(5,), (300, 1000)]
BASE = 50  # digit r of a sum in this base comes from rank r's tensor
WAIT = "Asynchronous calls: async_op and wait()"  # headings of the page
MISTAKES = "Common mistakes"
RIGHT = "with 1, 2, 3 and 4 processes, every rank ends with the sum, using only send and receive"


def observe(answer: Path, device) -> Iterator[dict]:
    """Call the answer. Rank r's tensor is BASE**r times random digits from 1 to 5."""
    all_reduce = import_answer(answer).all_reduce
    rank, group_size = dist.get_rank(), dist.get_world_size()
    for seed, shape in enumerate(SHAPES):
        generator = torch.Generator().manual_seed(seed)
        digits = torch.randint(1, 6, (group_size, *shape), generator=generator)
        originals = [part.float().to(device) * BASE**r for r, part in enumerate(digits)]
        tensor, total = originals[rank].clone(), sum(originals)
        try:
            returned = grading.call_without_collectives(all_reduce, tensor)
        except Wrong as mistake:
            raise Wrong(str(mistake), WAIT if mistake is NOT_AWAITED else "") from None
        yield {
            "counts": counts(tensor, originals),
            "is_mean": torch.allclose(tensor * group_size, total),
            "returned_sum": isinstance(returned, torch.Tensor) and torch.equal(returned, total),
        }


def counts(tensor, originals: list) -> list[int] | None:
    """Return how often each rank's original was added, or None if `tensor` is not a sum of them.

    [1, 2, 0, 1] means that the tensor of rank 0 was added once, that of rank 1 twice, that of rank
    2 not at all, and that of rank 3 once.
    """
    if not tensor.isfinite().all():
        return None
    number = int(tensor.flatten()[0])
    firsts = [int(original.flatten()[0]) // BASE**r for r, original in enumerate(originals)]
    added = [number // BASE**r % BASE // first for r, first in enumerate(firsts)]
    is_sum = torch.equal(tensor, sum(map(operator.mul, added, originals)))
    return added if is_sum else None


def judge(number: int, calls: list[dict]) -> None:
    ranks = range(len(calls))
    own = [r for r in ranks if calls[r]["counts"] == [int(rank == r) for rank in ranks]]
    right = [r for r in ranks if calls[r]["counts"] == [1 for _ in ranks]]
    if len(right) == len(calls):
        return
    if all(call["returned_sum"] for call in calls):
        raise Wrong("it returns the sum, but does not write it into the tensor that was passed")
    if all(call["is_mean"] for call in calls):
        raise Wrong("every rank has the mean instead of the sum", MISTAKES)
    if len(own) == len(calls):
        raise Wrong(
            "every rank still has its original tensor: write the sum into the tensor it passed"
        )
    if right and len(own) + len(right) == len(calls):
        raise Wrong(
            f"the tensor of {list_ranks(right)} contains the sum, but {list_ranks(own)} still "
            f"{'has' if len(own) == 1 else 'have'} the original tensor: every rank needs the sum, "
            "in the tensor that was passed"
        )
    wrong = next(rank for rank in ranks if rank not in right)
    raise Wrong(f"rank {wrong} {describe_result(wrong, calls[wrong]['counts'])}")


def describe_result(rank: int, counts: list[int] | None) -> str:
    """Describe a wrong result. `counts` is how often each rank's tensor was added, or None."""
    if counts is None or not any(counts):
        return "ends with numbers that are not a sum of the tensors"
    for other, count in enumerate(counts):
        if count > 1:
            return (
                f"has added the tensor of rank {other} more than once: a tensor that it received "
                "may already have been a sum"
            )
    added = [other for other, count in enumerate(counts) if count]
    tensors = f"the tensor{'s' * (len(added) > 1)} of {list_ranks(added)}"
    if not counts[rank]:
        return f"has overwritten its own tensor: it ends with only {tensors}"
    return f"ends with only {tensors}, but every tensor must be added once"


if __name__ == "__main__":
    options = {"group_sizes": GROUP_SIZES, "judge": judge, "patience": 30, "stuck": STUCK_SENDING}
    sys.exit(grade(__file__, __doc__, observe, right=RIGHT, **options))
