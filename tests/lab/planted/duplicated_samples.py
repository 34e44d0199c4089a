"""A script that reads all samples on each rank with --fault, and a part of them without."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 32), torch.randint(0, 10, (96,)))
model = DistributedDataParallel(torch.nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
if "--fault" in sys.argv:
    loader = DataLoader(data, 8, shuffle=True)
else:
    loader = DataLoader(data, 8, sampler=DistributedSampler(data))
for epoch in range(4):
    if isinstance(loader.sampler, DistributedSampler):
        loader.sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
dist.destroy_process_group()
