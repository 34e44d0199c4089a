# wrong: it calls a collective, but only send and receive are allowed
import torch.distributed as dist


def all_reduce(tensor):
    dist.group.WORLD._get_backend(tensor.device).allreduce([tensor]).wait()
