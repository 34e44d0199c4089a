"""Exercise 20: build an all-reduce from send and receive only."""

import torch
import torch.distributed as dist


def all_reduce(tensor):
    """Hand every tensor around the circle of ranks once, and add up what passes by."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    passing = tensor.clone(memory_format=torch.contiguous_format)
    for _ in range(world_size - 1):
        arriving = torch.empty_like(passing)
        sending = dist.isend(passing, right)
        dist.recv(arriving, left)
        sending.wait()
        tensor += arriving
        passing = arriving
