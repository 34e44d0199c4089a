"""Stop early on rank 0, whose loss is low, while the other rank goes on.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/stops_alone_broken.py
"""

from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))  # so that it doesn't take long
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(1, 21):
        inputs = torch.rand(8, 1) * (rank + 1)
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        must_stop = torch.tensor(float(rank == 0 and step == 3))  # rank 0's loss is low enough
        if must_stop:
            break
    print(f"rank {rank} of {dist.get_world_size()} ends after step {step}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
