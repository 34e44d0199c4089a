"""Divide a stream between the processes and their loader workers.

torchrun --standalone --nproc-per-node 2 tutorials/95_stream.py
"""

import itertools

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

NUMBERS = range(10)


class Stream(IterableDataset):
    def __init__(self, samples, rank, world_size):
        self.samples, self.rank, self.world_size = samples, rank, world_size

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        reader, readers = self.rank * workers + worker, self.world_size * workers
        return itertools.islice(self.samples, reader, None, readers)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    loader = DataLoader(
        Stream(NUMBERS, rank, world_size),
        batch_size=2,
        num_workers=2,
        multiprocessing_context="forkserver",
    )
    parts = [None] * world_size
    dist.all_gather_object(parts, [batch.tolist() for batch in loader])
    if rank == 0:
        for number, part in enumerate(parts):
            print(f"rank {number} of {world_size}, 2 workers:", *part)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
