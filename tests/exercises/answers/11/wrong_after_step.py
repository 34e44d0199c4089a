# wrong: plain_step clips the gradients after the optimizer has used them

import torch
import torch.nn.functional as F


def plain_step(model, optimizer, images, labels, max_norm):
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.zero_grad()


def data_parallel_step(model, optimizer, images, labels, max_norm):
    """Perform one optimizer step with `model`, an `nn.DataParallel`."""
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.zero_grad()


def ddp_step(model, optimizer, images, labels, max_norm):
    """Perform one optimizer step with `model`, a `DistributedDataParallel`."""
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.zero_grad()


def accelerate_step(accelerator, model, optimizer, images, labels, max_norm):
    """Perform one optimizer step with `model` and `optimizer` from `accelerator.prepare`."""
    loss = F.cross_entropy(model(images), labels)
    accelerator.backward(loss)
    optimizer.step()
    accelerator.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.zero_grad()
