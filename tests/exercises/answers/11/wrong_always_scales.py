# wrong: plain_step changes gradients whose total norm is below max_norm

import torch
import torch.nn.functional as F


def plain_step(model, optimizer, images, labels, max_norm):
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in model.parameters()])
    for weight in model.parameters():
        weight.grad *= max_norm / norm
    optimizer.step()
    optimizer.zero_grad()


def data_parallel_step(model, optimizer, images, labels, max_norm):
    """Perform one optimizer step with `model`, an `nn.DataParallel`."""
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in model.parameters()])
    for weight in model.parameters():
        weight.grad *= max_norm / norm
    optimizer.step()
    optimizer.zero_grad()


def ddp_step(model, optimizer, images, labels, max_norm):
    """Perform one optimizer step with `model`, a `DistributedDataParallel`."""
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in model.parameters()])
    for weight in model.parameters():
        weight.grad *= max_norm / norm
    optimizer.step()
    optimizer.zero_grad()


def accelerate_step(accelerator, model, optimizer, images, labels, max_norm):
    """Perform one optimizer step with `model` and `optimizer` from `accelerator.prepare`."""
    loss = F.cross_entropy(model(images), labels)
    accelerator.backward(loss)
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in model.parameters()])
    for weight in model.parameters():
        weight.grad *= max_norm / norm
    optimizer.step()
    optimizer.zero_grad()
