# wrong: on 3 processes, with 12 elements, rank 0 is missing the values of rank 1 in chunk
import torch


def reduce_scatter(chunks, wire):
    rank, world_size = wire.rank, wire.world_size
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    originals = [chunk.clone() for chunk in chunks]
    for step in range(1, world_size):
        outgoing, incoming = (rank - step) % world_size, (rank - step - 1) % world_size
        received = torch.empty_like(chunks[incoming])
        wire.exchange(originals[outgoing], right, received, left)
        chunks[incoming] += received
