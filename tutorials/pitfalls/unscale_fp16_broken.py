"""Train weights in fp16 with a `GradScaler`, which unscales only gradients in fp32.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/unscale_fp16_broken.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(1, 1).half())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(1, 5):
        if rank == 0:
            print(f"step {step} of 4 on {dist.get_world_size()} processes", flush=True)
        loss = model(torch.rand(8, 1).half()).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
