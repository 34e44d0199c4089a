"""Print a model that is wrapped in DataParallel and in DDP, and how to reach its weight.

python tutorials/25_wrapper.py
"""

import torch.distributed as dist
import torch.distributed.nn.functional  # noqa: F401 (before a group exists, so that its threads end)
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def show(model: nn.Module) -> None:
    print(model)
    try:
        print("model.weight:", list(model.weight.shape))
    except AttributeError as error:
        print("model.weight: AttributeError:", error)
    print("model.module.weight:", list(model.module.weight.shape))
    print("keys of model.state_dict():", ", ".join(model.state_dict()), end="\n\n")


if __name__ == "__main__":
    show(nn.DataParallel(nn.Linear(10, 1)))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    show(DistributedDataParallel(nn.Linear(10, 1)))
    dist.destroy_process_group()
