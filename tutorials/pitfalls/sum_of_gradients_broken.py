"""Add up the gradients of all ranks, which makes them too large by the number of ranks.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/sum_of_gradients_broken.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # all ranks start with the same weights
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = torch.linspace(0, 1, 16)[:, None]
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False))
    for step, batch in enumerate(loader):
        model(batch).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        if rank == 0 and step == 0:
            global_batch = data[: 2 * world_size]  # what all ranks together have read
            [right] = torch.autograd.grad(model(global_batch).square().mean(), model.weight)
            print(f"{world_size} processes: the gradient is {model.weight.grad.item():.3f}")
            print(f"the gradient of the global batch is {right.item():.3f}")
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
