"""Connect two processes on a fixed port, which another training is using.

python tutorials/pitfalls/port_in_use_broken.py
"""

import os
import socket

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(rank):
    dist.init_process_group("gloo", rank=rank, world_size=2)
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
    other_training = socket.create_server(("127.0.0.1", 0))  # it listens on its port
    other_port = other_training.getsockname()[1]
    port = other_port  # as if both scripts contained the same number, often 29500
    print(f"2 processes, on the port of another training: {port == other_port}", flush=True)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    mp.spawn(train, nprocs=2)


if __name__ == "__main__":
    main()
