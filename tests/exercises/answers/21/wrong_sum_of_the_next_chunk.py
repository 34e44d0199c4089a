# wrong: rank 0 has the sum of chunk 1, but needs the sum of chunk 0
import torch


def reduce_scatter(chunks, wire):
    rank, world_size = wire.rank, wire.world_size
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for step in range(world_size - 1):
        outgoing, incoming = (rank - step) % world_size, (rank - step - 1) % world_size
        received = torch.empty_like(chunks[incoming])
        wire.exchange(chunks[outgoing], right, received, left)
        chunks[incoming] += received
