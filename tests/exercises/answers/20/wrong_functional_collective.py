# wrong: it calls a collective, but only send and receive are allowed
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional


def all_reduce(tensor):
    tensor.copy_(functional.wait_tensor(functional.all_reduce(tensor, "sum", dist.group.WORLD)))
