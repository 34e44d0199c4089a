"""Exercise 93: keep the autograd graph across all_gather.

Each rank stores some of a layer's kernels. `rows` is a matrix with one kernel per row, has the same
shape on every rank, and is a leaf that requires a gradient. The total distance between all kernels
depends on the kernels of every rank. `dist.all_gather` collects them, but it copies them into
existing tensors, and autograd doesn't record that copy, so the graph is cut.

Every rank already gets the right total distance; what's missing is its gradient. Add it: once every
rank has called `total_distance(rows).backward()`, `rows.grad` should contain the gradient of the
total distance with respect to `rows`, as if one process had all the kernels.

`total_distance` must return a tensor with one element, which has the same value on every rank. The
check calls it with random float64 rows on 2 and on 3 connected processes. The value and the
gradient must be correct to about nine digits. You may change both functions and use any collective.

accel-demo check 93
"""

import torch
import torch.distributed as dist


def gather_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks, in rank order."""
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows)
    return torch.cat(parts)


def total_distance(rows: torch.Tensor) -> torch.Tensor:
    """Gather the kernels of all ranks. Return the sum of absolute differences over all pairs."""
    everything = gather_rows(rows)
    return (everything[:, None] - everything).abs().sum()
