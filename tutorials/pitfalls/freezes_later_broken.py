"""Freeze a layer of a model that DDP has already wrapped.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/freezes_later_broken.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    network = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1))
    model = DistributedDataParallel(network)
    network[0].requires_grad_(False)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.01)
    for step in range(1, 5):
        if rank == 0:
            print(f"step {step} of 4 on {dist.get_world_size()} processes", flush=True)
        model(torch.rand(8, 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
