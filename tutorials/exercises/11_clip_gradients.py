"""Exercise 11: clip the gradients in four versions of one training step.

Each function performs one optimizer step on one batch: `images`, floats of shape (batch size,
channels, height, width), and `labels`, integers of shape (batch size). `model` returns the logits.

None of the functions clips yet. Change each one so that the gradients the optimizer uses have a
total norm of at most `max_norm`. The total norm is the Euclidean length of a single vector that
contains all gradients. Gradients with a smaller norm stay as they are. With several processes, each
one has a different batch, and the limit applies to the gradients averaged over all of them.

`plain_step` and `data_parallel_step` run in one process, `ddp_step` and `accelerate_step` in one
process and in two. Each function is called several times, and the weights must then match those of
training with clipped gradients to within 1e-5.

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
