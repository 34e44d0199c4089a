"""Average the gradients of models that start with different weights.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/different_start_broken.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch import nn


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # each rank draws its own samples
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(10):
        loss = model(torch.rand(8, 4)).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
        optimizer.step()
        optimizer.zero_grad()
    weight = model.weight.detach()
    weights = [torch.empty_like(weight) for _ in range(world_size)]
    dist.all_gather(weights, weight)
    if rank == 0:
        difference = (weights[0] - weights[1]).abs().max()
        print(f"{world_size} processes: their weights differ by {difference:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
