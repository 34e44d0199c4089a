"""Exercise 24: write the two phases of DataParallel that split a batch and join the results.

`scatter(batch, devices)` returns a list with one part of the batch for each device:

- Tensors are split along dimension 0 only. All samples are kept, in the same order.
- Part i is on `devices[i]`. No part is empty, so there may be fewer parts than devices.
- A batch may also be a nested tuple, list or dict. Each part then has the same structure, with a
  part of each tensor. Values that are not tensors are the same in every part.

`gather(outputs, device)` takes a list with the output of each replica. It moves the outputs to
`device`, and concatenates them along dimension 0. An output is a tensor, or a tuple, list or dict
of tensors. If every replica returns a scalar (a tensor without dimensions), the result is a vector.

Gradients must flow back through both functions. The check calls `scatter`, page 24's replicate and
parallel_apply, and `gather`. It uses 1 to 8 replicas, and includes batches that cannot be divided
evenly. The gradients must be within 1e-6 of the gradients of the whole batch on one device.

Helpful: `torch.chunk`, `torch.cat`, and a recursive function for containers.

accel-demo check 24
"""

import torch


def scatter(batch, devices: list[torch.device]) -> list:
    raise NotImplementedError("write scatter in this file")


def gather(outputs: list, device: torch.device):
    raise NotImplementedError("write gather in this file")
