"""Exercise 46: train with local steps, and average the weights now and then."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


def take_step(model, optimizer, batch) -> None:
    inputs, labels = batch
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    optimizer.zero_grad()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: list, every: int):
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    for step, batch in enumerate(batches, start=1):
        take_step(model, optimizer, batch)
        if step % every == 0:
            average(model)
    average(model)


@torch.no_grad()
def average(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter)
        parameter /= dist.get_world_size()
