"""Exercise 06: share gradients by hand, and end with the same bits as DistributedDataParallel.

`share_gradients` is called after each backward, on every rank. It replaces each gradient by the
mean over all ranks, so the training works. On two processes the final weights even equal DDP's
weights, to the last bit. On three processes they do not. Change the function until they do.

`parameters` is a list, in the order of registration: the weight and the bias of the first layer,
then the weight and the bias of the next layer. `step` counts from 0. The model is small, so DDP
puts all of it into one bucket.

Three things affect the last bits: whether you divide by N or multiply by 1/N, how many buffers you
send, and the position of a gradient in its buffer. The position may change from step to step.

accel-demo check 06
"""

import torch.distributed as dist


def share_gradients(parameters, step):
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
