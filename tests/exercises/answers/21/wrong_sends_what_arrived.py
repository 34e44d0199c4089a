# wrong: on 3 processes, with 12 elements, rank 0 is missing the values of rank 2 in chunk
import torch


def reduce_scatter(chunks, wire):
    rank, world_size = wire.rank, wire.world_size
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    outgoing = chunks[left]
    for step in range(1, world_size):
        incoming = (rank - step - 1) % world_size
        received = torch.empty_like(chunks[incoming])
        wire.exchange(outgoing, right, received, left)
        chunks[incoming] += received
        outgoing = received
