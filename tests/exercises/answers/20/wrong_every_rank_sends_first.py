# wrong: has not finished after
import torch
import torch.distributed as dist


def all_reduce(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    outgoing, received = tensor.clone(), torch.empty_like(tensor)
    for _ in range(world_size - 1):
        dist.send(outgoing, (rank + 1) % world_size)
        dist.recv(received, (rank - 1) % world_size)
        tensor += received
        outgoing, received = received, outgoing
