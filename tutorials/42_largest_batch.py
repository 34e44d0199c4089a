"""Find the largest batch that fits into a limited memory (Linux).

python tutorials/42_largest_batch.py
"""

import resource

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size
from torch import nn

accelerator = Accelerator(cpu=True)
torch.set_num_threads(1)  # each thread needs memory of its own
limit = psutil.Process().memory_info().vms + 2**30  # 1 GiB more than now
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
sizes = iter([2**20, 2**19, 2**18, 2**17])  # without reduce_batch_size_fn: always 10% less


@find_executable_batch_size(
    starting_batch_size=next(sizes), reduce_batch_size_fn=lambda: next(sizes, 0)
)
def train(batch_size):
    accelerator.free_memory()  # what the attempt before has prepared
    print(f"batch size {batch_size:,}")
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(2):  # the optimizer creates its state in the first step
        accelerator.backward(model(torch.randn(batch_size, 64)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return batch_size


print(f"{train():,} fits")
