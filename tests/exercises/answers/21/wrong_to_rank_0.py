# wrong: but the limit is 48 bytes: it seems that rank 0 collects everything
import torch


def reduce_scatter(chunks, wire):
    rank, world_size = wire.rank, wire.world_size
    if rank > 0:
        for chunk in chunks:
            wire.send(chunk, 0)
        wire.receive(chunks[rank], 0)
        return
    for other in range(1, world_size):
        for chunk in chunks:
            received = torch.empty_like(chunk)
            wire.receive(received, other)
            chunk += received
    for other in range(1, world_size):
        wire.send(chunks[other], other)
