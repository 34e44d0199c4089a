"""Find unused parameters, and train with them."""

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel


def unused_parameters(model, loss):
    trained = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    gradients = torch.autograd.grad(
        loss, list(trained.values()), retain_graph=True, allow_unused=True
    )
    return [name for name, grad in zip(trained, gradients, strict=True) if grad is None]


def train(model, batches, learning_rate):
    replica = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    for inputs, targets, task in batches:
        optimizer.zero_grad()
        mse_loss(replica(inputs, task), targets).backward()
        optimizer.step()


def share_gradients(parameters, step):
    order = parameters if step == 0 else parameters[::-1]
    bucket = torch.cat([parameter.grad.flatten() for parameter in order])
    bucket *= 1 / dist.get_world_size()
    dist.all_reduce(bucket)
    pieces = bucket.split([parameter.numel() for parameter in order])
    for parameter, piece in zip(order, pieces, strict=True):
        parameter.grad.copy_(piece.view_as(parameter))
