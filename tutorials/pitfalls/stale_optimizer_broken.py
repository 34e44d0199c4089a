"""Create the optimizer before the model gets a new head, which is then never trained.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/stale_optimizer_broken.py
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
    model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model[2] = nn.Linear(4, 1)  # fine-tune with one output instead of ten
    before = model[2].weight.detach().clone()
    model = DistributedDataParallel(model)
    data = torch.linspace(0, 1, 16)[:, None]
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data))
    for batch in loader:
        loss = (model(batch) - 2 * batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        change = (model.module[2].weight - before).abs().max()
        print(f"{dist.get_world_size()} processes: the new head has changed by {change:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
