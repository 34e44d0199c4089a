"""Start with `mp.spawn` a function whose first parameter is the rank.

python tutorials/pitfalls/spawn_argument_fixed.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(rank, address, steps):
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(steps):
        model(torch.rand(8, 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"rank 0 of {dist.get_world_size()} has made {steps} steps")
    dist.destroy_process_group()


def main():
    print("starting 2 processes", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, args=(f"file://{folder}/store", 4), nprocs=2)


if __name__ == "__main__":
    main()
