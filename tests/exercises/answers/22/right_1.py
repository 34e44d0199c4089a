"""Exercise 22: find unused parameters, and train with them."""

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def unused_parameters(model, loss):
    """Return the names of the trainable parameters that are not in the graph of `loss`."""
    trainable = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    gradients = torch.autograd.grad(
        loss, list(trainable.values()), retain_graph=True, allow_unused=True
    )
    return [name for name, gradient in zip(trainable, gradients, strict=True) if gradient is None]


def train(model, batches, learning_rate):
    """Train `model` with plain SGD and DDP; the ranks may use different parts of the model."""
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=learning_rate)
    for inputs, targets, task in batches:
        mse_loss(ddp(inputs, task), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def share_gradients(parameters, step):
    """Average the gradients with the bits of DDP, which reverses its one bucket after step 0."""
    in_bucket_order = [weight.grad for weight in parameters[:: -1 if step else 1]]
    bucket = parameters_to_vector(in_bucket_order).mul_(1 / dist.get_world_size())
    dist.all_reduce(bucket)
    vector_to_parameters(bucket, in_bucket_order)
