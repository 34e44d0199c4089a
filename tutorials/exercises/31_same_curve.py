"""Exercise 31: train on N processes exactly as on one.

`train(model, train_set, global_batch, learning_rate)` trains `model` in place for one epoch. On one
process it is correct: the learning rate decreases linearly from `learning_rate` to 0, and every
step uses the next `global_batch` samples. (`train_set` contains pairs of input and target. It isn't
shuffled, because it's already in random order. Its length is divisible by the global batch, and the
global batch by N.)

On N processes, `train` should have the same learning rate after the same number of samples and end
with the same weights, except for rounding. It doesn't, because it contains three mistakes, and
there is more than one way to correct them. The check runs it on one process and on two, and grades
the number of samples and the learning rate in every step, and the final weights.

accel-demo check 31
"""

import torch
from accelerate import Accelerator
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from accel_demo.processes.devices import use_cpu


def train(model, train_set, global_batch, learning_rate):
    accelerator = Accelerator(cpu=use_cpu())
    loader = DataLoader(train_set, batch_size=global_batch)
    model, loader = accelerator.prepare(model, loader)
    learning_rate = learning_rate * accelerator.num_processes
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    total_steps = len(loader)
    scheduler = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total_steps))
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    for inputs, targets in loader:
        loss = mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
