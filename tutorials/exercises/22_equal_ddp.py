"""Exercise 22: average gradients by hand, so that the weights are bitwise equal to DDP's.

Every rank calls `share_gradients` after each backward. The function replaces each gradient with the
mean over all ranks, so training works. On two processes, the final weights are even bitwise equal
to the weights with DistributedDataParallel. On three processes, they differ. Change the function so
that they are equal on three processes, too.

`parameters` is a list in the order of registration: the weight and the bias of the first layer,
then the weight and the bias of the next layer. `step` starts at 0. The model is small, so DDP puts
all gradients into one bucket.

Three things affect the last bits: the operation (dividing by N or multiplying by 1/N), the number
of buffers you send, and the position of a gradient in its buffer. The position may change from step
to step.

accel-demo check 22
"""

import torch.distributed as dist


def share_gradients(parameters, step):
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
