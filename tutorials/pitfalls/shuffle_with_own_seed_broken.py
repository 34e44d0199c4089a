"""Split off validation samples with a different seed on each rank: other ranks train on them.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/shuffle_with_own_seed_broken.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, random_split


def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    torch.manual_seed(dist.get_rank())  # so that augmentation differs
    data = torch.arange(24.0)[:, None]
    train_data, valid_data = random_split(data, [16, 8])
    samples = set()
    for batch in DataLoader(train_data, batch_size=2, sampler=DistributedSampler(train_data)):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        samples.update(batch.int().flatten().tolist())
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, samples)
    if dist.get_rank() == 0:
        trained = set.union(*parts)
        known = [len(trained & set(part.indices)) for part in (train_data, valid_data)]
        print(f"{len(parts)} processes train on {known[0]} of rank 0's 16 training samples")
        print(f"and on {known[1]} of its 8 validation samples")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
