"""Exercise 24: split a batch for DataParallel and join the outputs.

`scatter(batch, devices)` returns a list of parts. `parts[i]` belongs to `devices[i]`:

- A batch is a tensor, or a tuple, list or dict. A container may hold tensors, other values, and
  more tuples, lists and dicts. A batch has at least one tensor, and all its tensors have the same
  number of samples, which is the length of dimension 0.
- A part has the same structure as the batch, with its share of each tensor on `devices[i]`. All
  other values, such as strings, numbers and empty lists, are the same in every part.
- Tensors are split along dimension 0 only. All samples are kept, in the same order, and all tensors
  in a part have the same number of samples.
- No part is empty, so there may be fewer parts than devices. No part has more samples than
  len(tensor) / len(devices), rounded up. The rest is up to you: 10 samples on four devices may
  become 3, 3, 3, 1 or 3, 3, 2, 2.

`gather(outputs, device)` takes a list with the output of each replica, in the order of the parts:

- An output is a tensor, or a tuple, list or dict, nested to any depth, in which every value is a
  tensor. All outputs have the same structure, and the result has it too.
- The outputs may be on different devices. Each tensor of the result is on `device` and is the
  concatenation of the replicas' tensors along dimension 0.
- Scalars (tensors without dimensions) become a vector with one element per replica.

Gradients flow back through both functions. You don't have to handle subclasses such as named
tuples.

The check calls each function alone, then both in training steps with 1 to 8 replicas, together with
`replicate` and `parallel_apply` from page 24. The gradients must be within 1e-6 of those you get
from the whole batch on one device. Without GPUs, the check still needs a second device, so it uses
"meta", a device whose tensors have a shape but no values.

accel-demo check 24
"""

import torch


def scatter(batch, devices: list[torch.device]) -> list:
    raise NotImplementedError("write scatter in this file")


def gather(outputs: list, device: torch.device):
    raise NotImplementedError("write gather in this file")
