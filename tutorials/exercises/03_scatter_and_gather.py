"""Exercise 03: write the two phases of DataParallel that split a batch and join it again.

`scatter(batch, devices)` gives a list with one part of the batch for each device:

- every tensor is split along dimension 0, and only there, with all samples in their order;
- part i is on `devices[i]`; no part is empty, so there may be fewer parts than devices;
- a tuple, list or dict in the batch becomes one in every part; all else goes to every part.

`gather(outputs, device)` gets a list with the output of each replica, and joins them again along
dimension 0, on `device`. An output is a tensor, or a tuple, list or dict of them. Where every
replica gives a number (a tensor without dimensions), a vector of them comes back.

Gradients have to find their way back through both. With replicate and parallel_apply of page 03 in
between, the gradients must be those of the whole batch within 1e-6, for 1 to 8 replicas and for
batches that do not divide.

Helpful: `torch.chunk`, `torch.cat`, and a function that calls itself for what is in a container.

accel-demo check 03
"""

import torch


def scatter(batch, devices: list[torch.device]) -> list:
    raise NotImplementedError("write scatter in this file")


def gather(outputs: list, device: torch.device):
    raise NotImplementedError("write gather in this file")
