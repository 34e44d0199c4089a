"""Save the weights of the model, which `torch.load` accepts.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/whole_model_fixed.py
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
        saved = model.module.state_dict()
        print(f"{world_size} processes: rank 0 saves {type(saved).__name__}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            torch.save(saved, f"{folder}/model.pt")
            loaded = torch.load(f"{folder}/model.pt")
        plain = nn.Linear(1, 1)
        plain.load_state_dict(loaded)
        print(f"{len(loaded)} tensors loaded")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
