# wrong: it returns the sum, but does not write it into the tensor that was passed
import torch
import torch.distributed as dist


def all_reduce(tensor):
    total = tensor.clone()
    if dist.get_rank() > 0:
        dist.send(total, 0)
        dist.recv(total, 0)
        return total
    received = torch.empty_like(tensor)
    for other in range(1, dist.get_world_size()):
        dist.recv(received, other)
        total += received
    for other in range(1, dist.get_world_size()):
        dist.send(total, other)
    return total
