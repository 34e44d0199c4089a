"""Read an `IterableDataset` with two loader workers, each of which yields all samples of its rank.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/stream_workers_broken.py
"""

from itertools import islice

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size

    def __iter__(self):
        yield from islice(torch.arange(16.0)[:, None], self.rank, None, self.world_size)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    stream = Stream(dist.get_rank(), dist.get_world_size())
    samples = []
    for batch in DataLoader(stream, 2, num_workers=2, multiprocessing_context="forkserver"):
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
