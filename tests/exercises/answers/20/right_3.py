"""Exercise 20, with a batch of sends and receives, and a barrier."""

import torch
import torch.distributed as dist


def all_reduce(tensor):
    own, rank, size = tensor.clone(), dist.get_rank(), dist.get_world_size()
    others = {other: torch.empty_like(own) for other in range(size) if other != rank}
    calls = [dist.P2POp(dist.isend, own, other) for other in others]
    calls += [dist.P2POp(dist.irecv, part, other) for other, part in others.items()]
    for work in dist.batch_isend_irecv(calls) if calls else []:
        work.wait()
    dist.barrier()
    for part in others.values():
        tensor += part
