"""Load the pretrained weights on rank 0 before wrapping the model, which copies them to all ranks.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/loads_on_rank_0_fixed.py
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
    pretrained = {"weight": torch.full((1, 1), 2.0), "bias": torch.zeros(1)}
    model = nn.Linear(1, 1)
    if dist.get_rank() == 0:
        model.load_state_dict(pretrained)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = torch.linspace(0, 1, 16)[:, None]
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data))
    for batch in loader:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weight = model.module.weight.detach()
    weights = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
    dist.all_gather(weights, weight)
    if dist.get_rank() == 0:
        difference = (weights[0] - weights[1]).abs().max()
        print(f"{len(weights)} processes: their weights differ by {difference:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
