"""Divide the cores of the machine between the processes.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/threads_times_processes_fixed.py
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main():
    dist.init_process_group("gloo")
    cores = os.cpu_count()
    torch.set_num_threads(max(1, cores // dist.get_world_size()))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.rand(16, 1)
    for batch in DataLoader(data, batch_size=2, sampler=DistributedSampler(data)):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    threads = torch.tensor(torch.get_num_threads())
    dist.all_reduce(threads)
    if dist.get_rank() == 0:
        print(f"threads per core, in {dist.get_world_size()} processes: {threads / cores:.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
