"""A model answer to exercise 13."""

import torch
import torch.distributed as dist


class GatherRows(torch.autograd.Function):
    """All-gather of rows with a gradient. Each rank gets the gradient of its own rows."""

    @staticmethod
    def forward(ctx, rows):
        ctx.count = len(rows)
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        # Every rank computed the same number from all rows, so this gradient is already complete.
        return gradient.split(ctx.count)[dist.get_rank()]


def gather_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks, in the order of the ranks."""
    return GatherRows.apply(rows)


def total_distance(rows: torch.Tensor) -> torch.Tensor:
    """Return the sum of absolute differences over all pairs of kernels, equal on every rank."""
    everything = gather_rows(rows)
    return (everything[:, None] - everything).abs().sum()
