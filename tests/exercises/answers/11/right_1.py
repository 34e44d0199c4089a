"""Exercise 11: clip the gradients in four versions of one training step."""

import torch.nn.functional as F
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def shorten_gradients(model, max_norm):
    """Scale all gradients of `model` down together, if their total norm is above `max_norm`."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    total_norm = get_total_norm(parameter.grad for parameter in parameters)
    clip_grads_with_norm_(parameters, max_norm, total_norm)


def local_step(model, optimizer, images, labels, max_norm):
    F.cross_entropy(model(images), labels).backward()
    shorten_gradients(model, max_norm)
    optimizer.step()
    optimizer.zero_grad()


# After backward(), .grad holds the whole gradient in all three: DataParallel has added up parts,
# and DDP has averaged them over the processes.
plain_step = data_parallel_step = ddp_step = local_step


def accelerate_step(accelerator, model, optimizer, images, labels, max_norm):
    accelerator.backward(F.cross_entropy(model(images), labels))
    accelerator.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
