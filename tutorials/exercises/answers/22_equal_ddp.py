"""A model answer to exercise 22."""

import torch
import torch.distributed as dist


def share_gradients(parameters, step):
    ordered = parameters if step == 0 else parameters[::-1]
    flat = torch.cat([parameter.grad.flatten() for parameter in ordered])
    flat *= 1 / dist.get_world_size()
    dist.all_reduce(flat)
    parts = flat.split([parameter.numel() for parameter in ordered])
    for parameter, part in zip(ordered, parts, strict=True):
        parameter.grad.copy_(part.view_as(parameter))
