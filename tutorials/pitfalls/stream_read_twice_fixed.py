"""Train with an `IterableDataset` that yields the share of its rank.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/stream_read_twice_fixed.py
"""

from itertools import islice

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        numbers = torch.arange(16.0)[:, None]
        yield from islice(numbers, dist.get_rank(), None, dist.get_world_size())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    samples = []
    for batch in DataLoader(Stream(), batch_size=2):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        samples += batch.int().flatten().tolist()
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, samples)
    samples = sum(parts, [])
    read = f"read {len(samples)} samples, {len(set(samples))} different ones"
    if dist.get_rank() == 0:
        print(f"{len(parts)} processes {read}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
