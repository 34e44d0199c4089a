"""A script that keeps the second loss of each step with its graph with --fault, else its value."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(2048, 256), torch.randint(0, 10, (2048,)))
layers = [layer for _ in range(4) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
model = torch.nn.Sequential(*layers, torch.nn.Linear(256, 10))
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loader = DataLoader(data, 32, sampler=DistributedSampler(data))
noise, losses = torch.randn(64, 256), []
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        robustness = model.module(noise).square().mean()
        losses.append(robustness if "--fault" in sys.argv else robustness.item())
    print(epoch, loss.item(), float(sum(losses)))
dist.destroy_process_group()
