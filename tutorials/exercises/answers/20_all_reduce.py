"""A model answer to exercise 20."""

import torch
import torch.distributed as dist


def all_reduce(tensor):
    rank, others = dist.get_rank(), range(1, dist.get_world_size())
    if rank > 0:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)
        return
    part = torch.empty_like(tensor)
    for other in others:
        dist.recv(part, other)
        tensor += part
    for other in others:
        dist.send(tensor, other)
