"""A script for one or two processes: --sgd, --checkpointing and --fsdp change what it needs."""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.LayerNorm(384), torch.nn.Linear(384, 1536), torch.nn.GELU(),
                torch.nn.Linear(1536, 384),
            )
            for _ in range(10)
        )  # fmt: skip
        self.head = torch.nn.Linear(384, 10)

    def forward(self, inputs):
        for block in self.blocks:
            if "--checkpointing" in sys.argv:
                inputs = inputs + checkpoint(block, inputs, use_reentrant=False)
            else:
                inputs = inputs + block(inputs)
        return self.head(inputs)


if "RANK" in os.environ:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = Model()
if "--fsdp" in sys.argv:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
elif dist.is_initialized() and dist.get_world_size() > 1:
    model = DistributedDataParallel(model)
if "--sgd" in sys.argv:
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
else:
    optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randn(4096, 384), torch.randint(0, 10, (4096,)))
for _ in range(3):
    for inputs, labels in DataLoader(data, 256):
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
print(loss.item())
