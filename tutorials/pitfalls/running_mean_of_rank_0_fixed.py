"""Normalize with a running mean that all ranks compute from all samples, and save it.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/running_mean_of_rank_0_fixed.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))
        self.linear = nn.Linear(1, 1)

    def forward(self, inputs):
        if self.training:
            mean = inputs.mean(0)
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            self.mean = 0.5 * self.mean + 0.5 * mean
        return self.linear(inputs - self.mean)


def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Normalized())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = torch.tensor([1.0, 3.0] * 16)[:, None] + torch.linspace(-0.01, 0.01, 32)[:, None]
    for batch in DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False)):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.module.state_dict(), f"{folder}/model.pt")
        print(f"{dist.get_world_size()} processes: the saved mean is {model.module.mean[0]:.1f}")
        print(f"the mean of all samples is {data.mean().item():.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
