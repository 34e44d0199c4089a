"""Exercise 93: keep the autograd graph across all_gather."""

import torch
import torch.distributed as dist


def gather_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks, in rank order, without a graph."""
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.detach())
    return torch.cat(parts)


def total_distance(rows: torch.Tensor) -> torch.Tensor:
    """Return the sum of absolute differences over all pairs of kernels.

    Each rank computes only the pairs whose first kernel it stores. A pair (i, j) also occurs as
    (j, i), with the same value, so the gradient of all pairs is twice that of the own ones.
    """
    own_pairs = (rows[:, None] - gather_rows(rows)).abs().sum()
    total = own_pairs.detach().clone()
    dist.all_reduce(total)
    return total + 2 * (own_pairs - own_pairs.detach())
