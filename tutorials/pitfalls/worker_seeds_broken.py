"""Add noise to the samples with NumPy, whose seed is the same on all ranks.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/worker_seeds_broken.py
"""

import numpy
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Noisy(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        noise = numpy.random.normal()
        return torch.tensor([index + noise]).float(), noise


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    numpy.random.seed(0)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    noises = []
    for batch, noise in DataLoader(Noisy(), batch_size=2, sampler=DistributedSampler(Noisy())):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        noises += noise.tolist()
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, noises)
    noises = sum(parts, [])
    if dist.get_rank() == 0:
        print(
            f"{len(parts)} processes: {len(set(noises))} random numbers for {len(noises)} samples"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
