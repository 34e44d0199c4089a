# wrong: on 2 processes, rank 0 has overwritten its own tensor: it ends with only the tensor of
import torch
import torch.distributed as dist


def all_reduce(tensor):
    if dist.get_rank() > 0:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)
        return
    total = torch.zeros_like(tensor)
    for other in range(1, dist.get_world_size()):
        dist.recv(tensor, other)
        total += tensor
    if dist.get_world_size() > 1:
        tensor.copy_(total)
    for other in range(1, dist.get_world_size()):
        dist.send(tensor, other)
