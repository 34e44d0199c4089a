"""Exercise 31: one curve, whatever the number of processes."""

import torch
from accelerate import Accelerator
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader

from accel_demo.processes.devices import use_cpu


def train(model, train_set, global_batch, learning_rate):
    accelerator = Accelerator(cpu=use_cpu())
    share = global_batch // accelerator.num_processes
    updates = len(train_set) // global_batch
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    model, loader, optimizer = accelerator.prepare(model, DataLoader(train_set, share), optimizer)
    # It stays outside of `prepare`, so one call is one step of the schedule on any launch.
    schedule = LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=updates)
    for inputs, targets in loader:
        accelerator.backward(mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
