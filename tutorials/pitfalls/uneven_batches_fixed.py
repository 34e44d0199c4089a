"""Train on shards of different lengths with `Join`, so that no rank waits in vain.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/uneven_batches_fixed.py
"""

from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))  # so that it doesn't take long
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    shard = torch.arange(17.0)[rank::2, None]  # 9 samples on rank 0, 8 on rank 1
    with Join([model]):
        for batch in DataLoader(shard, batch_size=2):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    if rank == 1:
        print(f"rank 1 of {dist.get_world_size()} has read its {len(shard)} samples", flush=True)
    dist.barrier()
    if rank == 0:
        print(f"rank 0 of {dist.get_world_size()} has read its {len(shard)} samples", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
