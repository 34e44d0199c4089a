"""Divide the loader workers between the processes.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/workers_times_processes_fixed.py
"""

import multiprocessing

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

CORES = 2  # of the machine


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.rand(16, 1)
    loader = DataLoader(
        data,
        batch_size=2,
        sampler=DistributedSampler(data),
        num_workers=CORES // dist.get_world_size(),
        multiprocessing_context="forkserver",
    )
    for batch in loader:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        started = torch.tensor(len(multiprocessing.active_children()))
    dist.all_reduce(started)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes: {started} loader workers for {CORES} cores")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
