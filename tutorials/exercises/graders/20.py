"""Grade exercise 20: call all_reduce on one to four processes, and check which tensors were added.

python tutorials/exercises/graders/20.py FILE
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from accel_demo.lab.grading import Wrong, grade, import_answer

GROUP_SIZES = (1, 2, 3, 4)
SHAPES = [(5,), (300, 1000)]  # small and large: isend returns long before a large tensor has left
COLLECTIVES = (
    *("all_reduce", "reduce", "broadcast", "scatter", "gather", "all_gather", "all_to_all"),
    *("reduce_scatter", "all_gather_into_tensor", "all_to_all_single", "reduce_scatter_tensor"),
    *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
    *("all_reduce_coalesced", "all_gather_coalesced", "reduce_scatter_coalesced"),
    # methods of a process group, such as dist.group.WORLD
    *("allreduce", "allgather", "alltoall", "alltoall_base", "_allgather_base"),
    *("_reduce_scatter_base", "all_gather_single", "reduce_scatter_single", "gather_single"),
    *("allreduce_coalesced", "allgather_coalesced", "gather_into_tensor"),
    *("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"),
)
RIGHT = "with 1, 2, 3 and 4 processes, every rank gets the sum, using only send and receive"


def observe(answer: Path, device) -> Iterator[dict]:
    """Call the answer. Rank r's tensor is 10**r times the same random digits from 1 to 9."""
    import torch
    import torch.distributed as dist

    forbid_collectives()
    all_reduce, group_size = import_answer(answer).all_reduce, dist.get_world_size()
    for seed, shape in enumerate(SHAPES):
        generator = torch.Generator().manual_seed(seed)
        digits = torch.randint(1, 10, shape, generator=generator).float().to(device)
        tensor = digits * 10 ** dist.get_rank()
        total = digits * sum(10**rank for rank in range(group_size))
        returned = all_reduce(tensor)
        yield {
            "counts": counts(tensor / digits, group_size),
            "is_mean": torch.allclose(tensor * group_size, total),
            "returned_sum": isinstance(returned, torch.Tensor)
            and returned.shape == total.shape
            and bool((returned == total).all()),
        }


def forbid_collectives() -> None:
    """Replace the collectives of torch.distributed with functions that raise `Wrong`."""
    import torch.distributed as dist

    def forbidden(name: str):
        def fail(*arguments, **options):
            raise Wrong(f"it calls torch.distributed's {name}: use only send and recv")

        return fail

    for name in COLLECTIVES:
        for place in (dist, dist.distributed_c10d, dist.ProcessGroup):
            if hasattr(place, name):
                setattr(place, name, forbidden(name))


def counts(factors, group_size: int) -> list[int] | None:
    """Return how often each rank's tensor was added, or None if `factors` are not such counts.

    If all factors are 1021, then the tensor of rank 0 was added once, that of rank 1 twice, that of
    rank 2 not at all, and that of rank 3 once.
    """
    number = factors.flatten()[0].item()
    if not 0 <= number < 10**group_size or number != int(number) or not (factors == number).all():
        return None
    return [int(number) // 10**rank % 10 for rank in range(group_size)]


def judge(number: int, calls: list[dict]) -> None:
    ranks = range(len(calls))
    own = [r for r in ranks if calls[r]["counts"] == [int(rank == r) for rank in ranks]]
    right = [r for r in ranks if calls[r]["counts"] == [1 for _ in ranks]]
    if len(right) == len(calls):
        return
    if all(call["returned_sum"] for call in calls):
        raise Wrong("it returns the sum, but does not write it into the tensor that was passed")
    if all(call["is_mean"] for call in calls):
        raise Wrong("every rank has the mean, and not the sum")
    if len(own) == len(calls):
        raise Wrong("every rank ends with its original tensor: write the sum into this tensor")
    if right and len(own) + len(right) == len(calls):
        raise Wrong(
            f"the tensor of {named(right)} contains the sum, but {named(own)} still has the "
            "original tensor: every rank needs the sum, in the tensor that was passed"
        )
    wrong = next(rank for rank in ranks if rank not in right)
    raise Wrong(f"rank {wrong} {described(wrong, calls[wrong]['counts'])}")


def described(rank: int, counts: list[int] | None) -> str:
    """Describe a wrong result. `counts` says how often each rank's tensor was added."""
    if counts is None or not any(counts):
        return "ends with numbers that are not a sum of the tensors"
    for other, count in enumerate(counts):
        if count > 1:
            return (
                f"has added the tensor of rank {other} more than once: a tensor that it received "
                "may already have been a sum"
            )
    added = [other for other, count in enumerate(counts) if count]
    tensors = f"the tensor{'s' * (len(added) > 1)} of {named(added)}"
    if not counts[rank]:
        return f"has overwritten its own tensor: it ends with {tensors} alone"
    return f"ends with {tensors} alone, and not with every tensor once"


def named(ranks: list[int]) -> str:
    """Return "rank 0", "ranks 0 and 1" or "ranks 0, 1 and 2"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


if __name__ == "__main__":
    options = {"group_sizes": GROUP_SIZES, "judge": judge, "patience": 30}
    sys.exit(grade(__file__, __doc__, observe, right=RIGHT, **options))
