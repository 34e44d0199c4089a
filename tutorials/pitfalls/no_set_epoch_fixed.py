"""Train with a `DistributedSampler`, whose order changes in each epoch.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/no_set_epoch_fixed.py
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
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = torch.arange(16.0)[:, None]
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        order = []
        for batch in loader:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            order += [int(number) for number in batch]
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: rank 0 of {dist.get_world_size()} reads {order}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
