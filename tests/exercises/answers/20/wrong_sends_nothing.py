# wrong: on 2 processes, rank 0 ends with numbers that are not a sum of the tensors
import torch.distributed as dist


def all_reduce(tensor):
    tensor /= 50 ** dist.get_rank()
    tensor *= sum(50**rank for rank in range(dist.get_world_size()))
