# wrong: plain_step limits each element of the gradients instead of the total norm

import torch
import torch.nn.functional as F


def plain_step(model, optimizer, images, labels, max_norm):
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()


def data_parallel_step(model, optimizer, images, labels, max_norm):
    """Perform one optimizer step with `model`, an `nn.DataParallel`."""
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()


def ddp_step(model, optimizer, images, labels, max_norm):
    """Perform one optimizer step with `model`, a `DistributedDataParallel`."""
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()


def accelerate_step(accelerator, model, optimizer, images, labels, max_norm):
    """Perform one optimizer step with `model` and `optimizer` from `accelerator.prepare`."""
    loss = F.cross_entropy(model(images), labels)
    accelerator.backward(loss)
    accelerator.clip_grad_value_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
