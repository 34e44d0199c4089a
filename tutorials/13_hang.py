"""A hang: rank 0 evaluates while rank 1 waits at the barrier, so their collectives differ.

accel-demo audit tutorials/13_hang.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def evaluate(model, inputs):
    with torch.no_grad():
        loss = model(inputs).square().mean()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # different inputs on each rank
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        inputs = torch.randn(8, 4)
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {evaluate(model, inputs):.4f}")
        dist.barrier()


if __name__ == "__main__":
    main()
