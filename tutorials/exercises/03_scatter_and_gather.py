"""Exercise 03: write the two phases of DataParallel that split a batch and join the results.

`scatter(batch, devices)` returns a list with one part of the batch for each device:

- Every tensor is split along dimension 0 only, and keeps all samples in their order.
- Part i is on `devices[i]`. No part is empty, so there may be fewer parts than devices.
- For a tuple, list or dict in the batch, every part contains a tuple, list or dict. Everything else
  is passed to every part.

`gather(outputs, device)` gets a list with the output of each replica, and joins them along
dimension 0, on `device`. An output is a tensor, or a tuple, list or dict of tensors. If every
replica returns a number (a tensor without dimensions), the result is a vector.

Gradients must flow back through both functions. With replicate and parallel_apply of page 03
between them, the gradients must equal those of the whole batch within 1e-6, for 1 to 8 replicas,
and for batches that cannot be divided evenly.

Helpful: `torch.chunk`, `torch.cat`, and a function that calls itself for the contents of a
container.

accel-demo check 03
"""

import torch


def scatter(batch, devices: list[torch.device]) -> list:
    raise NotImplementedError("write scatter in this file")


def gather(outputs: list, device: torch.device):
    raise NotImplementedError("write gather in this file")
