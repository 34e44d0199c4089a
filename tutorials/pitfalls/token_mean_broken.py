"""Average the mean losses of two ranks that have different numbers of tokens.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/token_mean_broken.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = nn.Linear(1, 2, bias=False)
    nn.init.zeros_(model.weight)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    inputs = torch.arange(32.0)[:, None]
    targets = torch.tensor([0, 1] * 16)
    targets[torch.arange(32) % 8 == 1] = -100  # padding, which has no loss
    sampler = DistributedSampler(data := TensorDataset(inputs, targets), shuffle=False)
    for step, (tokens, labels) in enumerate(DataLoader(data, batch_size=4, sampler=sampler)):
        loss = cross_entropy(model(tokens), labels)
        loss.backward()
        if rank == 0 and step == 0:
            alone = model.module.weight.detach().clone().requires_grad_()
            right = cross_entropy(inputs[:8] @ alone.T, targets[:8])  # what all ranks have read
            [right] = torch.autograd.grad(right, alone)
            gradient = model.module.weight.grad
            print(f"{world_size} processes: the gradient is {gradient[0].item():.3f}")
            print(f"the gradient of all 7 tokens is {right[0].item():.3f}")
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
