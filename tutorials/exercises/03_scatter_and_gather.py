"""Exercise 03: write the two phases of DataParallel that split a batch and join the results.

`scatter(batch, devices)` returns a list with one part of the batch for each device:

- Tensors are split along dimension 0 only. All samples are kept, in the same order.
- Part i is on `devices[i]`. No part is empty, so there may be fewer parts than devices.
- If the batch contains a tuple, list or dict, each part contains a tuple, list or dict with parts
  of its tensors. Any other value is the same in every part.

`gather(outputs, device)` takes a list with the output of each replica. It concatenates the outputs
along dimension 0, on `device`. An output is a tensor, or a tuple, list or dict of tensors. If every
replica returns a scalar (a tensor without dimensions), the result is a vector.

Gradients must flow back through both functions. The check runs replicate and parallel_apply of
page 03 between them, with 1 to 8 replicas, also for batches that cannot be divided evenly. The
gradients must be within 1e-6 of the gradients of the whole batch.

Helpful: `torch.chunk`, `torch.cat`, and a recursive function for containers.

accel-demo check 03
"""

import torch


def scatter(batch, devices: list[torch.device]) -> list:
    raise NotImplementedError("write scatter in this file")


def gather(outputs: list, device: torch.device):
    raise NotImplementedError("write gather in this file")
