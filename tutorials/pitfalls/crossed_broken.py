"""Call an all-reduce that one rank reaches before its barrier, and the other one after it.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/crossed_broken.py
"""

from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))  # so that it doesn't take long
    rank = dist.get_rank()
    if rank != 0:
        dist.barrier()  # rank 0 prepares the data first
    data = torch.arange(16.0)[rank::2, None]  # what rank 0 has prepared
    if rank == 0:
        print(f"rank 0 of {dist.get_world_size()} has prepared the data", flush=True)
    mean = data.mean()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    if rank == 0:
        dist.barrier()  # the other ranks may read the data now
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for batch in (data - mean).split(2):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        print(f"the mean of all ranks is {mean}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
