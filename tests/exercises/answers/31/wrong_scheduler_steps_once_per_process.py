# wrong: on 2 processes, the schedule ends after 4 of 8 steps
import torch
from accelerate import Accelerator
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from accel_demo.processes.devices import use_cpu


def train(model, train_set, global_batch, learning_rate):
    accelerator = Accelerator(cpu=use_cpu())
    loader = DataLoader(train_set, batch_size=global_batch // accelerator.num_processes)
    model, loader = accelerator.prepare(model, loader)
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
