# wrong: this is the complete all-reduce, but only its first half is needed
import torch


def reduce_scatter(chunks, wire):
    rank, world_size = wire.rank, wire.world_size
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for step in range(1, world_size):
        outgoing, incoming = (rank - step) % world_size, (rank - step - 1) % world_size
        received = torch.empty_like(chunks[incoming])
        wire.exchange(chunks[outgoing], right, received, left)
        chunks[incoming] += received
    for step in range(world_size - 1):
        outgoing, incoming = (rank - step) % world_size, (rank - step - 1) % world_size
        wire.exchange(chunks[outgoing], right, chunks[incoming], left)
