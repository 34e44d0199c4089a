"""Divide what a sampler yields between the processes.

torchrun --standalone --nproc-per-node 2 tutorials/95_share.py
"""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler, WeightedRandomSampler

NUMBERS = range(10)


class Share(Sampler):
    def __init__(self, sampler):
        self.sampler = sampler

    def __len__(self):
        return len(self.sampler) // dist.get_world_size()

    def __iter__(self):
        share = list(self.sampler)[dist.get_rank() :: dist.get_world_size()]
        return iter(share[: len(self)])


def main():
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)  # the same list on all ranks
    weights = torch.tensor([1.0] * 5 + [3.0] * 5)
    sampler = Share(WeightedRandomSampler(weights, len(NUMBERS), generator=generator))
    parts = [None] * dist.get_world_size()
    batches = [batch.tolist() for batch in DataLoader(NUMBERS, batch_size=2, sampler=sampler)]
    dist.all_gather_object(parts, batches)
    if dist.get_rank() == 0:
        for rank, part in enumerate(parts):
            print(f"rank {rank} of {len(parts)}:", *part)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
