# wrong: rank 0 has sent to its left neighbor, rank 2, but may send only to rank 1
import torch


def reduce_scatter(chunks, wire):
    rank, world_size = wire.rank, wire.world_size
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for step in range(1, world_size):
        outgoing, incoming = (rank + step) % world_size, (rank + step + 1) % world_size
        received = torch.empty_like(chunks[incoming])
        wire.exchange(chunks[outgoing], left, received, right)
        chunks[incoming] += received
