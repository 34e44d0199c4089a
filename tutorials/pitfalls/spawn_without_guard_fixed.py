"""Start two processes with `mp.spawn`. Each of them imports this file, but doesn't call `main`.

python tutorials/pitfalls/spawn_without_guard_fixed.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(rank, address):
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(4):
        model(torch.rand(8, 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        print(f"rank 0 of {dist.get_world_size()} has trained")
    dist.destroy_process_group()


def main():
    print(f"{mp.current_process().name} starts 2 processes", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, args=(f"file://{folder}/store",), nprocs=2)


if __name__ == "__main__":
    main()
