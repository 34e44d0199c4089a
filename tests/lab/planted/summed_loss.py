"""A script that adds the losses of a batch with --fault, and averages them without."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 32), torch.randint(0, 10, (512,)))
model = torch.nn.Sequential(
    torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 10)
)
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.001, momentum=0.9)
loader = DataLoader(data, 16, sampler=DistributedSampler(data))
reduction = "sum" if "--fault" in sys.argv else "mean"
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels, reduction=reduction)
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
dist.destroy_process_group()
