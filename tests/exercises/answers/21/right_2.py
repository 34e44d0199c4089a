"""The first half of the chunked ring."""

import torch


def reduce_scatter(chunks, wire):
    count = wire.world_size
    right, left = (wire.rank + 1) % count, (wire.rank - 1) % count
    index = left
    while index != wire.rank:
        outgoing = chunks[index]
        index = (index - 1) % count
        arriving = torch.empty_like(chunks[index])
        wire.exchange(outgoing, right, arriving, left)
        chunks[index].add_(arriving)
