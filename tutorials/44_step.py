"""Train a small layer with DDP on the CPU, and print the time of a step on rank 0.

torchrun --standalone --nproc-per-node 2 tutorials/44_step.py

This script imports nothing from accel_demo: it is a stand-in for yours.
"""

import gc
import statistics
import time

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(1024, 512, bias=False))  # 2 MiB of gradients
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs, times = torch.randn(8, 1024), []
for _ in range(4):
    dist.barrier()
    start = time.perf_counter()
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.perf_counter() - start)
if dist.get_rank() == 0:
    size = sum(parameter.nbytes for parameter in model.parameters())
    step = statistics.median(times[1:])  # the first step also connects the processes
    print(f"processes {dist.get_world_size()}, gradient bytes {size}, seconds per step {step:.4f}")
dist.destroy_process_group()
del model, optimizer  # the last references to the group, whose threads must end before Python does
gc.collect()
