"""Save the weights of the wrapped model, whose names a plain model doesn't know.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/module_prefix_broken.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.rand(16, 1)
    for batch in DataLoader(data, batch_size=2, sampler=DistributedSampler(data)):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.state_dict(), f"{folder}/model.pt")
            weights = torch.load(f"{folder}/model.pt")
        plain = nn.Linear(1, 1)
        known = len(weights.keys() & plain.state_dict().keys())
        print(f"{world_size} processes: {known} of {len(weights)} names are known", flush=True)
        plain.load_state_dict(weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
