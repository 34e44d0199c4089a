"""Name the folder of the run after the time, which each rank reads by itself.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/folder_by_the_clock_broken.py
"""

import shutil
import tempfile
import time
from datetime import datetime
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    time.sleep(rank / 100)  # processes are never equally fast
    folder = Path(tempfile.gettempdir(), f"{datetime.now():%Y-%m-%d_%H-%M-%S.%f}")
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.arange(16.0)[:, None] / 16
    for batch in DataLoader(data, batch_size=2, sampler=DistributedSampler(data)):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(torch.get_rng_state(), folder / f"random_state_{rank}.pt")
    dist.barrier()
    if rank == 0:
        states = len(list(folder.glob("random_state_*.pt")))
        print(f"rank 0's folder has {states} of {dist.get_world_size()} random states")
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)  # another rank may have removed it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
