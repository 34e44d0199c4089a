# wrong: do they still all-reduce the gradients of the same parameters?
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss


def unused_parameters(model, loss):
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    parameters = [parameter for _, parameter in named]
    gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    return [name for (name, _), grad in zip(named, gradients, strict=True) if grad is None]


def train(model, batches, learning_rate):
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    for inputs, targets, task in batches:
        mse_loss(model(inputs, task), targets).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
