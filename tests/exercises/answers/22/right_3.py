"""Exercise 22, without the bonus."""

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel


def unused_parameters(model, loss):
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    parameters = [parameter for _, parameter in named]
    gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    return [name for (name, _), grad in zip(named, gradients, strict=True) if grad is None]


def train(model, batches, learning_rate):
    model = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    for inputs, targets, task in batches:
        loss = mse_loss(model(inputs, task), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
