"""Clip the gradients in four versions of one training step."""

import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_


def shorten(parameters, max_norm):
    """Scale all gradients by one factor, so that their total norm is at most `max_norm`."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    if total > max_norm:
        for gradient in gradients:
            gradient.mul_(max_norm / total)


def plain_step(model, optimizer, images, labels, max_norm):
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    shorten(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()


def data_parallel_step(model, optimizer, images, labels, max_norm):
    """Perform one optimizer step with `model`, an `nn.DataParallel`."""
    plain_step(model, optimizer, images, labels, max_norm)


def ddp_step(model, optimizer, images, labels, max_norm):
    """Perform one optimizer step with `model`, a `DistributedDataParallel`."""
    F.cross_entropy(model(images), labels).backward()
    clip_grad_norm_(model.module.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()


def accelerate_step(accelerator, model, optimizer, images, labels, max_norm):
    """Perform one optimizer step with `model` and `optimizer` from `accelerator.prepare`."""
    loss = F.cross_entropy(model(images), labels)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
