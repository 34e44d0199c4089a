"""Exercise 06: share gradients by hand, and end with the bits of DistributedDataParallel.

`share_gradients` is called after each backward, on every rank. It gives each gradient its mean over
all ranks, so it trains well. On two processes it even ends with the weights of DDP, to the last
bit. On three it does not. Change it until it does.

`parameters` is a list, in the order of registration: the weight and the bias of the first layer,
then those of the next. `step` counts from 0. The model is small: DDP has all of it in one bucket.

What decides about the last bits: whether you divide by N or multiply by 1/N, how many buffers you
send, and where in its buffer a gradient lies. The last may change from one step to another.

accel-demo check 06
"""

import torch.distributed as dist


def share_gradients(parameters, step):
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
