"""Skip a batch whose loss is NaN on the rank that has read it, while the other rank doesn't.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/skips_nan_batch_broken.py
"""

from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))  # so that it doesn't take long
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    data = torch.arange(32.0)[:, None]
    data[9] = float("nan")  # rank 1 reads it in its second batch
    sampler = DistributedSampler(data, shuffle=False)
    steps = 0
    for batch in DataLoader(data, batch_size=4, sampler=sampler):
        loss = model(batch).square().mean()
        is_nan = loss.isnan().float()
        if is_nan:
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    if rank == 1:
        print(f"rank 1 of {dist.get_world_size()} has made {steps} steps", flush=True)
    dist.barrier()
    if rank == 0:
        print(f"rank 0 of {dist.get_world_size()} has made {steps} steps", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
