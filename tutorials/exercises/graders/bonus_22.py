"""Grade the bonus of exercise 22: train on 3 processes, and compare the weights with DDP's."""

import sys
from pathlib import Path

from grading import Wrong, dist, grade, import_answer, torch

GROUP_SIZES = (3,)
PATIENCE = 30  # seconds; a correct answer takes less than a second
SUM = "the sum of the gradients, not their mean"
RIGHT = "on 3 processes, the weights are bitwise equal to DDP's weights"


def observe(answer: Path, device) -> None:
    from torch.nn.parallel import DistributedDataParallel

    from accel_demo.anatomy.ddp.comparison import train_with

    share = getattr(import_answer(answer), "share_gradients", None)
    if share is None:
        raise NotImplementedError("share_gradients")
    weights = train_with(device, share=share)
    by_rank = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(by_rank, weights)
    with_ddp = train_with(device, wrap=DistributedDataParallel)
    at_levels = {name: train_with(device, share=share) for name, share in levels().items()}
    if torch.equal(weights, with_ddp):
        return
    if not all(torch.equal(weights, other) for other in by_rank):
        raise Wrong(
            "the ranks end with different weights: the gradients are not averaged over all ranks"
        )
    for name, other in at_levels.items():
        # Recognize a sum even if its last bits differ, because they depend on the order.
        if torch.equal(weights, other) or (name == SUM and torch.allclose(weights, other)):
            raise Wrong(f"the weights differ from DDP's: this is {name}")
    raise Wrong(
        "the weights do not match any known level. They differ from DDP's weights by up to "
        f"{(weights - with_ddp).abs().max().item():.1e}"
    )


def levels() -> dict:
    """Return {printed name: function of (parameters, step) that combines the gradients}."""
    from accel_demo.anatomy.ddp.by_hand import average_each, average_flat

    def add_up(parameters, step):
        for parameter in parameters:
            dist.all_reduce(parameter.grad)

    def divide_each(parameters, step):
        average_each(parameters)

    def multiply_each(parameters, step):
        for parameter in parameters:
            parameter.grad *= 1 / dist.get_world_size()
            dist.all_reduce(parameter.grad)

    def divide_first(parameters, step):
        ordered = list(parameters) if step == 0 else list(parameters)[::-1]
        flat = torch.cat([parameter.grad.flatten() for parameter in ordered])
        flat /= dist.get_world_size()
        dist.all_reduce(flat)
        sizes = [parameter.numel() for parameter in ordered]
        for parameter, part in zip(ordered, flat.split(sizes), strict=True):
            parameter.grad.copy_(part.view_as(parameter))

    def flat(multiply, is_reversed):
        return lambda parameters, step: average_flat(parameters, multiply, is_reversed(step))

    one_buffer = "level 2, one flat buffer"
    return {
        SUM: add_up,
        "level 1, one all-reduce per parameter, then a division": divide_each,
        "level 1, one all-reduce per parameter, but multiplied by 1/N": multiply_each,
        f"{one_buffer}, but divided by N": flat(False, lambda step: False),
        f"{one_buffer} in the right order, but divided by N": flat(False, lambda step: step > 0),
        f"{one_buffer} in the right order, but divided by N before it is sent": divide_first,
        f"{one_buffer} in reverse, but divided by N": flat(False, lambda step: True),
        "level 3, multiplied by 1/N, but never in reverse": flat(True, lambda step: False),
        "level 4, in reverse, but from the first step on": flat(True, lambda step: True),
        "level 4, in reverse, but only in the first step": flat(True, lambda step: step == 0),
    }


if __name__ == "__main__":
    options = {"group_sizes": GROUP_SIZES, "patience": PATIENCE}
    sys.exit(grade(__file__, __doc__, observe, right=RIGHT, **options))
