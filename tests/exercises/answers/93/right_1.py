"""Exercise 93: keep the autograd graph across all_gather."""

import torch
import torch.distributed as dist


class _SumOfShares(torch.autograd.Function):
    """The sum of all ranks' shares, of which each pair of two ranks' kernels is in two."""

    @staticmethod
    def forward(ctx, share: torch.Tensor) -> torch.Tensor:
        total = share.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient  # the other ranks' shares depend on these rows in the same way


def gather_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks, in rank order, as constants."""
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.detach())
    return torch.cat(parts).detach()


def total_distance(rows: torch.Tensor) -> torch.Tensor:
    """Sum the absolute differences over all pairs. Each rank computes those of its own kernels."""
    share = (rows[:, None] - gather_rows(rows)).abs().sum()
    return _SumOfShares.apply(share)
