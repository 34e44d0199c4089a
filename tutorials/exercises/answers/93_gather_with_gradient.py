"""A model answer to exercise 93.

Each rank computes the total from all rows. So the gradient of its own rows is complete: it includes
the pairs with another rank's row on either side, and nothing has to be sent in backward. A shorter
right answer is to replace this rank's part of the gathered list by `rows` itself. Both would be
wrong if each rank computed only a share of the total, because parts of the gradient would be
missing.
"""

import torch
import torch.distributed as dist


class GatherRows(torch.autograd.Function):
    """All-gather rows. In backward, return the gradient of this rank's own rows."""

    @staticmethod
    def forward(ctx, rows):
        ctx.count = len(rows)
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.split(ctx.count)[dist.get_rank()]


def gather_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks, in rank order."""
    return GatherRows.apply(rows)


def total_distance(rows: torch.Tensor) -> torch.Tensor:
    """Gather the kernels of all ranks. Return the sum of absolute differences over all pairs."""
    everything = gather_rows(rows)
    return (everything[:, None] - everything).abs().sum()
