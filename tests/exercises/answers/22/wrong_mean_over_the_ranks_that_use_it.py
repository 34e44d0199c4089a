# wrong: train averages a gradient over only the ranks that use the parameter
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
            used = torch.tensor(float(parameter.grad is not None), device=parameter.device)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(used)
            dist.all_reduce(parameter.grad)
            parameter.grad /= used.clamp(min=1)
        optimizer.step()
        optimizer.zero_grad()
