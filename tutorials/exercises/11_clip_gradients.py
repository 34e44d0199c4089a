"""Exercise 11: clip the gradients in four versions of one training step.

Each function performs one optimizer step on one batch: `images`, floats of the shape (batch size,
channels, height, width), and `labels`, integers of the shape (batch size). `model` returns the
logits. The functions do not clip yet. Change each of them so that the total norm of the gradients
that the optimizer uses is at most `max_norm`. The total norm is the Euclidean length of one vector
that contains all gradients. Gradients with a smaller norm stay as they are. With several processes,
this is about the gradients averaged over all processes. Each process has a different batch.

`plain_step` and `data_parallel_step` run in one process, `ddp_step` and `accelerate_step` in one
process and in two. Each function is called several times. Then its weights have to equal those of
training with clipped gradients, within 1e-5.

accel-demo check 11
"""

import torch.nn.functional as F


def plain_step(model, optimizer, images, labels, max_norm):
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def data_parallel_step(model, optimizer, images, labels, max_norm):
    """Perform one optimizer step with `model`, an `nn.DataParallel`."""
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def ddp_step(model, optimizer, images, labels, max_norm):
    """Perform one optimizer step with `model`, a `DistributedDataParallel`."""
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def accelerate_step(accelerator, model, optimizer, images, labels, max_norm):
    """Perform one optimizer step with `model` and `optimizer` from `accelerator.prepare`."""
    loss = F.cross_entropy(model(images), labels)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
