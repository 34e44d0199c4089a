"""Exercise 31: train on N processes exactly as on one.

The processes share each global batch, and the scheduler is not prepared, so it advances once per
optimizer step.
"""

import torch
from accelerate import Accelerator
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from accel_demo.processes.devices import use_cpu


def train(model, train_set, global_batch, learning_rate):
    accelerator = Accelerator(cpu=use_cpu())
    batch_per_process = global_batch // accelerator.num_processes
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(train_set, batch_per_process)
    )
    optimizer_steps = len(train_set) // global_batch
    scheduler = LambdaLR(optimizer, lambda step: 1 - step / optimizer_steps)
    for inputs, targets in loader:
        accelerator.backward(mse_loss(model(inputs), targets))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
