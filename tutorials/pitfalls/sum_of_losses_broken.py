"""Use the sum of the samples' losses, whose gradient DistributedDataParallel makes too small.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/sum_of_losses_broken.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main():
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    data = torch.arange(16.0)[:, None]
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    whole = mse_loss(model(data[:4]), 2 * data[:4], reduction="sum")
    [right] = torch.autograd.grad(whole, model.weight)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False))
    for step, batch in enumerate(loader):
        loss = mse_loss(model(batch), 2 * batch, reduction="sum")
        loss.backward()
        if dist.get_rank() == 0 and step == 0:
            gradient = model.module.weight.grad.item()
            print(f"{world_size} processes: the gradient is {gradient:.2f}")
            print(f"that of the global batch is {right.item():.2f}")
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
