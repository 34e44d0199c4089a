"""A model answer to exercise 11."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F


def plain_step(model, optimizer, window, max_norm):
    for inputs, labels in window:
        loss = F.cross_entropy(model(inputs), labels)
        (loss / len(window)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()


def data_parallel_step(model, optimizer, window, max_norm):
    """Perform one optimizer step with `model`, an `nn.DataParallel`."""
    for inputs, labels in window:
        loss = F.cross_entropy(model(inputs), labels)
        (loss / len(window)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()


def ddp_step(model, optimizer, window, max_norm):
    """Perform one optimizer step with `model`, a `DistributedDataParallel`."""
    for index, (inputs, labels) in enumerate(window):
        sync_gradients = index + 1 == len(window)
        with nullcontext() if sync_gradients else model.no_sync():
            loss = F.cross_entropy(model(inputs), labels)
            (loss / len(window)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()


def accelerate_step(accelerator, model, optimizer, window, max_norm):
    """Perform one optimizer step. `accelerator` accumulates over all micro-batches of `window`."""
    for inputs, labels in window:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
