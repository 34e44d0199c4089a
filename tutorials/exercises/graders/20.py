"""Grade exercise 20: call all_reduce on one to four processes, and check which tensors were added.

python tutorials/exercises/graders/20.py FILE
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from accel_demo.lab.grading import Wrong, grade, import_answer

GROUP_SIZES = (1, 2, 3, 4)
SHAPES = [(5,), (300, 1000)]  # the first tensor fits into gloo's buffers, the second does not
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
    """Call the answer. Digit r of the sum shows how often the tensor of rank r was added."""
    import torch
    import torch.distributed as dist

    forbid_collectives()
    all_reduce, group_size = import_answer(answer).all_reduce, dist.get_world_size()
    for shape in SHAPES:
        ones = (torch.arange(torch.Size(shape).numel(), device=device) % 3 + 1.0).reshape(shape)
        tensor = ones * 10 ** dist.get_rank()
        total = ones * sum(10**rank for rank in range(group_size))
        returned = all_reduce(tensor)
        yield {
            "is_sum": torch.equal(tensor, total),
            "is_mean": torch.allclose(tensor * group_size, total),
            "returned_sum": isinstance(returned, torch.Tensor) and torch.equal(returned, total),
            "content": content(tensor / ones, group_size),
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


def content(counts, group_size: int) -> str:
    """Return the ranks whose tensors were added, in words. Digit r of each count is for rank r."""
    number = counts.flatten()[0].item()
    if not (counts == number).all() or number != int(number) or not 0 < number < 10**group_size:
        return "something that is not a sum of the tensors"
    digits = [int(digit) for digit in reversed(str(int(number)))]
    ranks = [str(rank) for rank, digit in enumerate(digits) for _ in range(digit)]
    if len(ranks) == 1:
        return f"the tensor of rank {ranks[0]} alone"
    return f"the tensors of ranks {', '.join(ranks[:-1])} and {ranks[-1]} alone"


def judge(number: int, calls: list[dict]) -> None:
    right = [rank for rank, call in enumerate(calls) if call["is_sum"]]
    if len(right) == len(calls):
        return
    if all(call["returned_sum"] for call in calls):
        raise Wrong("it returns the sum, but does not write it into the tensor: add in place")
    if len(right) == 1:
        raise Wrong(f"rank {right[0]} alone has the sum: send it back to the others")
    if all(call["is_mean"] for call in calls):
        raise Wrong("every rank has the mean, and not the sum")
    wrong = next(rank for rank in range(len(calls)) if rank not in right)
    raise Wrong(f"rank {wrong} ends with {calls[wrong]['content']}, and not with every tensor once")


if __name__ == "__main__":
    options = {"group_sizes": GROUP_SIZES, "judge": judge, "patience": 30}
    sys.exit(grade(__file__, __doc__, observe, right=RIGHT, **options))
