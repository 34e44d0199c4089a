# wrong: unused_parameters changes the `.grad` of
import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel


def unused_parameters(model, loss):
    loss.backward(retain_graph=True)
    named = model.named_parameters()
    return [name for name, p in named if p.requires_grad and p.grad is None]


def train(model, batches, learning_rate):
    model = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    for inputs, targets, task in batches:
        loss = mse_loss(model(inputs, task), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
