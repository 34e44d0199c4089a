"""Train with BatchNorm on two ranks, and evaluate with the running statistics of each rank.

python tutorials/32_evaluation.py
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from accel_demo.anatomy.batch_norm import NO_BROADCAST, convert
from accel_demo.processes.group import run_in_group
from accel_demo.show import table


def make_data(seed: int) -> TensorDataset:
    inputs = torch.randn(512, 8, generator=torch.Generator().manual_seed(seed)) * 2 + 1
    return TensorDataset(inputs, inputs.square().mean(1, keepdim=True))


def train(device, synchronize=False, **options) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1)
    model = nn.Sequential(*layers).to(device)
    ddp = DistributedDataParallel(convert(model) if synchronize else model, **options)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    data = make_data(seed=1)
    sampler = DistributedSampler(data)  # in random order
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            mse_loss(ddp(inputs.to(device)), targets.to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return ddp


def broadcast_buffers(model: nn.Module) -> None:
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


def average_buffers(model: nn.Module) -> None:
    for buffer in model.buffers():
        if buffer.is_floating_point():  # not the number of batches, which is equal
            dist.all_reduce(buffer)
            buffer /= dist.get_world_size()


def nothing(_) -> None:
    pass


WRAPPED = "rank 0's, by `ddp(inputs)`"
WITHOUT = f"BatchNorm, `{next(iter(NO_BROADCAST))}=False`"
RUNS: list[tuple[str, str, dict, Callable]] = [
    ("BatchNorm", "each rank's", {}, nothing),
    ("BatchNorm", WRAPPED, {}, nothing),
    ("BatchNorm", "rank 0's, broadcast", {}, broadcast_buffers),
    (WITHOUT, "each rank's", NO_BROADCAST, nothing),
    (WITHOUT, "average", NO_BROADCAST, average_buffers),
    ("SyncBatchNorm", "each rank's", {"synchronize": True}, nothing),
]


def main(device: torch.device) -> None:
    inputs, targets = (each.to(device) for each in make_data(seed=2).tensors)
    rows = []
    for name, statistics, options, change in RUNS:
        ddp = train(device, **options).eval()
        change(ddp.module)
        with torch.no_grad():
            loss = mse_loss((ddp if statistics == WRAPPED else ddp.module)(inputs), targets)
        losses = [torch.empty_like(loss) for _ in range(dist.get_world_size())]
        dist.all_gather(losses, loss)
        rows.append([name, statistics, *(f"{each.item():.3f}" for each in losses)])
    if dist.get_rank() == 0:
        print(table(["layer", "running statistics", "loss of rank 0", "loss of rank 1"], rows))


if __name__ == "__main__":
    run_in_group(main, 2)
