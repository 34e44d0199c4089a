"""Clip gradients that are still multiplied by the factor of the GradScaler.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/clips_scaled_broken.py
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main():
    dist.init_process_group("gloo")
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    data = torch.arange(16)[:, None] / 16
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data))
    norms = []
    for batch in loader:
        with torch.autocast("cpu", torch.float16):
            loss = model(batch).square().mean()
        scaler.scale(loss).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes: the first norm is {norms[0]:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
