# wrong: it calls torch.distributed's all_reduce: use only send and recv
import torch.distributed as dist


def all_reduce(tensor):
    dist.all_reduce(tensor)
