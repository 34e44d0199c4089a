"""Train with the same seed on all ranks, which then drop the same features.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/same_dropout_broken.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dropout = nn.Dropout(0.5)
    model = DistributedDataParallel(nn.Sequential(dropout, nn.Linear(20, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = torch.rand(16, 20)
    masks = []
    dropout.register_forward_hook(lambda _, inputs, output: masks.append((output != 0).tolist()))
    for batch in DataLoader(data, batch_size=2, sampler=DistributedSampler(data)):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, masks)
    if dist.get_rank() == 0:
        equal = sum(one == other for one, other in zip(*parts, strict=True))
        print(f"{len(parts)} processes: {equal} of {len(masks)} dropout masks are equal")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
