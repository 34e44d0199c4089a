# wrong: on 3 processes, with 12 elements, rank 0 has sent to its left neighbor, rank 2, but
import torch


def reduce_scatter(chunks, wire):
    rank, world_size = wire.rank, wire.world_size
    for distance in range(1, world_size):
        target, source = (rank + distance) % world_size, (rank - distance) % world_size
        received = torch.empty_like(chunks[rank])
        wire.exchange(chunks[target], target, received, source)
        chunks[rank] += received
