"""Read the local rank from an argument, which has another name since PyTorch 2.0.

python -m torch.distributed.launch --standalone --nproc-per-node 2 \
    tutorials/pitfalls/local_rank_argument_broken.py
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    local_rank = parser.parse_args().local_rank
    dist.init_process_group("gloo")
    torch.manual_seed(local_rank)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(4):
        model(torch.rand(8, 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sum_of_local_ranks = torch.tensor(local_rank)
    dist.all_reduce(sum_of_local_ranks)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes: the sum of local ranks is {sum_of_local_ranks}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
