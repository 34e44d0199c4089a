"""Exercise 11: clip the gradients in all four versions of the loop, with the same results.

Each function performs one optimizer step: it accumulates the gradients of a `window` of
micro-batches `(inputs, labels)`. It does not clip them yet. Change each function so that the
gradients that the optimizer uses have a total norm of at most `max_norm`.

The optimizer uses the gradients of the whole window, averaged over all processes. Clip these
gradients once per optimizer step. When are they complete in each of the four functions?

Helpful: `torch.nn.utils.clip_grad_norm_`; `accelerator.clip_grad_norm_`, which also handles the
scaled gradients of fp16; `accelerator.sync_gradients`.

accel-demo check 11
"""

from contextlib import nullcontext

import torch.nn.functional as F


def plain_step(model, optimizer, window, max_norm):
    for inputs, labels in window:
        loss = F.cross_entropy(model(inputs), labels)
        (loss / len(window)).backward()
    optimizer.step()
    optimizer.zero_grad()


def data_parallel_step(model, optimizer, window, max_norm):
    """Perform one optimizer step with `model`, an `nn.DataParallel`."""
    for inputs, labels in window:
        loss = F.cross_entropy(model(inputs), labels)
        (loss / len(window)).backward()
    optimizer.step()
    optimizer.zero_grad()


def ddp_step(model, optimizer, window, max_norm):
    """Perform one optimizer step with `model`, a `DistributedDataParallel`."""
    for index, (inputs, labels) in enumerate(window):
        sync_gradients = index + 1 == len(window)
        with nullcontext() if sync_gradients else model.no_sync():
            loss = F.cross_entropy(model(inputs), labels)
            (loss / len(window)).backward()
    optimizer.step()
    optimizer.zero_grad()


def accelerate_step(accelerator, model, optimizer, window, max_norm):
    """Perform one optimizer step. `accelerator` accumulates over all micro-batches of `window`."""
    for inputs, labels in window:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
