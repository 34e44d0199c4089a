# wrong: it calls a collective, but only send and receive are allowed
import torch
import torch.distributed as dist


def reduce_scatter(chunks, wire):
    total = chunks[wire.rank].clone()
    for rank, chunk in enumerate(chunks):
        dist.reduce(total if rank == wire.rank else chunk.clone(), rank)
    right = (wire.rank + 1) % wire.world_size
    left = (wire.rank - 1) % wire.world_size
    for step in range(1, wire.world_size):
        outgoing = chunks[(wire.rank - step) % wire.world_size]
        incoming = torch.empty_like(chunks[(wire.rank - step - 1) % wire.world_size])
        wire.exchange(outgoing, right, incoming, left)
    chunks[wire.rank].copy_(total)
