# wrong: ends with only the tensors of ranks 0 and 2, but every tensor must be added once. (It is
import torch
import torch.distributed as dist


def all_reduce(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return
    received = torch.empty_like(tensor)
    sent = dist.isend(tensor.clone(), (rank + 1) % world_size)
    dist.recv(received, (rank - 1) % world_size)
    sent.wait()
    tensor += received
