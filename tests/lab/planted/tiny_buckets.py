"""A script whose DDP has buckets of 10 KiB with --fault, and of 25 MiB without."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(2048, 128), torch.randint(0, 10, (2048,)))
layers = [torch.nn.Linear(128, 128) for _ in range(16)]
model = torch.nn.Sequential(*layers, torch.nn.Linear(128, 10))
options = {"bucket_cap_mb": 0.01} if "--fault" in sys.argv else {}
model = DistributedDataParallel(model, **options)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loader = DataLoader(data, 128, sampler=DistributedSampler(data))
for epoch in range(10):
    loader.sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
print(loss.item())
dist.destroy_process_group()
