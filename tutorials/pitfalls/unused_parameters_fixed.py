"""Train a model with two heads, and let DDP find out in each step which of them is unused.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/unused_parameters_fixed.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(1, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])

    def forward(self, inputs, task):
        return self.heads[task](self.body(inputs))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(Model(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(1, 5):
        if rank == 0:
            print(f"step {step} of 4 on {dist.get_world_size()} processes", flush=True)
        model(torch.rand(8, 1), step % 2).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
