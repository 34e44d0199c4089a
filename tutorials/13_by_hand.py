"""A check for one's own script: do all ranks have the same weights?

torchrun --standalone --nproc-per-node 2 tutorials/13_by_hand.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def differing(model):
    """Return the names of values that differ between ranks or are NaN.

    Every rank calls it. It takes two collectives per tensor, so call it once per epoch.
    """
    names = []
    for name, own in (*model.named_parameters(), *model.named_buffers()):
        of_rank_0 = own.detach().clone()
        dist.broadcast(of_rank_0, 0)
        is_different = torch.tensor(int(not torch.equal(own, of_rank_0)), device=own.device)
        dist.all_reduce(is_different)
        names += [name] if is_different else []
    return names


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # different inputs on each rank
    network = nn.Linear(4, 1)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for name, called in ("model", model), ("network", network):
        called(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        names = differing(model)
        if dist.get_rank() == 0:
            print(f"after a step with {name}(inputs): {names}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
