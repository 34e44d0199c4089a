# wrong: has put new tensors into the list: change the existing tensors
import torch


def reduce_scatter(chunks, wire):
    rank, world_size = wire.rank, wire.world_size
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for step in range(1, world_size):
        outgoing, incoming = (rank - step) % world_size, (rank - step - 1) % world_size
        received = torch.empty_like(chunks[incoming])
        wire.exchange(chunks[outgoing], right, received, left)
        chunks[incoming] = chunks[incoming] + received
