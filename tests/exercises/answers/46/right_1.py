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
    ranks = dist.get_world_size()

    def sync():
        for p in model.parameters():
            total = p.data.clone()
            dist.all_reduce(total, op=dist.ReduceOp.SUM)
            p.data = total / ranks

    for p in model.parameters():
        start = p.data.clone()
        dist.broadcast(start, 0)
        p.data.copy_(start)
    done = 0
    for batch in batches:
        take_step(model, optimizer, batch)
        done += 1
        if done % every == 0:
            sync()
    sync()
