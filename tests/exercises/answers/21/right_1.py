"""Exercise 21: write the first half of the chunked ring, the reduce-scatter."""

import torch


def reduce_scatter(chunks, wire):
    """Add up the partial sums of the left neighbors, from chunk `rank - 2` down to `rank`."""
    count = wire.world_size
    neighbors = {"target": (wire.rank + 1) % count, "source": (wire.rank - 1) % count}
    for distance in range(1, count):
        leaving = chunks[(wire.rank - distance) % count]
        growing = chunks[(wire.rank - distance - 1) % count]
        arriving = torch.empty_like(growing)
        wire.exchange(leaving, incoming=arriving, **neighbors)
        growing.add_(arriving)
