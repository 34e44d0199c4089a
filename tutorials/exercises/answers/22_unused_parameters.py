"""A model answer to exercise 22."""

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel


def unused_parameters(model, loss):
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(
        loss, list(trainable.values()), retain_graph=True, allow_unused=True
    )
    return [name for name, grad in zip(trainable, gradients, strict=True) if grad is None]


def train(model, batches, learning_rate):
    model = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    for inputs, targets, task in batches:
        loss = mse_loss(model(inputs, task), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def share_gradients(parameters, step):
    ordered = parameters if step == 0 else parameters[::-1]
    flat = torch.cat([parameter.grad.flatten() for parameter in ordered])
    flat *= 1 / dist.get_world_size()
    dist.all_reduce(flat)
    parts = flat.split([parameter.numel() for parameter in ordered])
    for parameter, part in zip(ordered, parts, strict=True):
        parameter.grad.copy_(part.view_as(parameter))
