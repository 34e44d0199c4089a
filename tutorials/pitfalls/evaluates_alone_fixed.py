"""Evaluate the model inside DDP on rank 0 alone, while the other rank waits at a barrier.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/evaluates_alone_fixed.py
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
    torch.manual_seed(rank)
    network = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4))
    network.eval()  # fine-tune with the statistics of a pretrained BatchNorm
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for epoch in range(1, 4):
        for _ in range(3):
            model(torch.rand(8, 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            print(f"epoch {epoch}: rank 0 of {dist.get_world_size()} evaluates", flush=True)
            with torch.no_grad():
                model.module(torch.ones(8, 1))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
