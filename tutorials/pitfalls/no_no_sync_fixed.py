"""Accumulate gradients over four batches, and all-reduce them after the last one.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/no_no_sync_fixed.py
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(1, 1))
    all_reduces = []

    def count(state, bucket):
        all_reduces.append(bucket.index())
        return allreduce_hook(state, bucket)

    model.register_comm_hook(None, count)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.rand(32, 1)
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data))
    for number, batch in enumerate(loader, 1):
        is_last = number % 4 == 0
        with nullcontext() if is_last else model.no_sync():
            (model(batch).square().mean() / 4).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    if dist.get_rank() == 0:
        counts = f"{len(all_reduces)} all-reduces for {number // 4} steps"
        print(f"{dist.get_world_size()} processes: {counts}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
