"""Add up the correct samples of all ranks, although `DistributedSampler` lets two ranks read one.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/counts_padding_broken.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = torch.linspace(0, 1, 17)[:, None]
    for batch in DataLoader(data, batch_size=2, sampler=DistributedSampler(data, drop_last=True)):
        (model(batch) - batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sampler = DistributedSampler(data, shuffle=False)
    test_loader = DataLoader(data, batch_size=4, sampler=sampler)
    counts = torch.zeros(2)  # correct samples, samples
    model.eval()
    with torch.no_grad():
        for batch in test_loader:
            model.module(batch)
            is_correct = batch < 0.25  # samples 0 to 3
            counts += torch.tensor([is_correct.sum(), len(batch)])
    dist.all_reduce(counts)
    if rank == 0:
        print(f"{world_size} processes: {int(counts[0])} of {int(counts[1])} samples are correct")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
