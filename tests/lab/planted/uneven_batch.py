"""A script whose last batch is smaller on rank 1 with --fault: 97 samples, divided by hand."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
samples = 97 if "--fault" in sys.argv else 96
data = TensorDataset(torch.randn(samples, 32), torch.randint(0, 10, (samples,)))
model = DistributedDataParallel(torch.nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for epoch in range(4):
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(epoch)).tolist()
    for inputs, labels in DataLoader(Subset(data, order[rank::world]), 8):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
dist.destroy_process_group()
