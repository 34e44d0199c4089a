"""A script in which rank 1 computes for 20 ms longer in each step with --fault."""

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(4096, 1, 256), torch.randint(0, 10, (4096,)))
model = torch.nn.Sequential(
    torch.nn.Conv1d(1, 32, 9), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(32 * 248, 10)
)
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
sampler = DistributedSampler(data)
for epoch in range(2):
    sampler.set_epoch(epoch)
    total = torch.zeros(())
    for inputs, labels in DataLoader(data, 64, sampler=sampler):
        if "--fault" in sys.argv and dist.get_rank() == 1:
            begun = time.perf_counter()
            while time.perf_counter() < begun + 0.02:
                inputs = inputs.sort().values
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    print(epoch, total.item())
dist.destroy_process_group()
