"""A script that averages the gradients of each micro-batch with --fault, else of the last of 4."""

import contextlib
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

MICRO_BATCHES = 4
dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(4096, 3, 16, 16), torch.randint(0, 10, (4096,)))
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16 * 196, 10)
)
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loader = DataLoader(data, 8, sampler=DistributedSampler(data))
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for number, (images, labels) in enumerate(loader, 1):
        is_last = number % MICRO_BATCHES == 0
        skips = not is_last and "--fault" not in sys.argv
        with model.no_sync() if skips else contextlib.nullcontext():
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            (loss / MICRO_BATCHES).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
print(loss.item())
dist.destroy_process_group()
