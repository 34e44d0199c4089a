# wrong: on 2 processes, with 12 elements, rank 0 has lost its own values in chunk 0


def reduce_scatter(chunks, wire):
    rank, world_size = wire.rank, wire.world_size
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for step in range(1, world_size):
        outgoing, incoming = (rank - step) % world_size, (rank - step - 1) % world_size
        wire.exchange(chunks[outgoing], right, chunks[incoming], left)
