"""Find out which forwards of a DDP model broadcast its buffers, and when the ranks' buffers differ.

python tutorials/22_buffers.py
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_demo.anatomy.ddp.flight_recorder import recorded
from accel_demo.processes.group import run_in_group
from accel_demo.show import table

TRAIN, ACCUMULATE, EVALUATE = "train", "train in `no_sync()`", "evaluate in `no_grad()`"
CALLS = [
    *(TRAIN, TRAIN, EVALUATE, EVALUATE, TRAIN),  # without gradient accumulation
    *(ACCUMULATE, ACCUMULATE, TRAIN, EVALUATE),  # a complete window
    *(ACCUMULATE, EVALUATE),  # a window whose last micro-batch is missing
]


def main(device: torch.device) -> None:
    network = nn.BatchNorm1d(4).to(device)
    ddp = DistributedDataParallel(network)
    ddp(torch.randn(8, 4, device=device)).sum().backward()
    ddp(torch.randn(8, 4, device=device)).sum().backward()  # DDP has built its buckets again
    rows = []
    for number, name in enumerate(CALLS, start=1):
        ddp.train(name != EVALUATE)
        inputs = torch.randn(8, 4, device=device) + dist.get_rank()  # different on each rank
        with (
            recorded() as collectives,
            torch.set_grad_enabled(name != EVALUATE),
            ddp.no_sync() if name == ACCUMULATE else nullcontext(),
        ):
            outputs = ddp(inputs)
            if name != EVALUATE:
                outputs.sum().backward()
        means = [torch.empty_like(network.running_mean) for _ in range(dist.get_world_size())]
        dist.all_gather(means, network.running_mean)
        is_sent = any(call.name == "broadcast" for call in collectives)
        equal = all(torch.equal(mean, means[0]) for mean in means)
        rows.append([number, name, "yes" if is_sent else "no", "equal" if equal else "different"])
    if dist.get_rank() == 0:
        head = ["call", "`ddp(inputs)`", "broadcasts buffers", "running mean afterwards"]
        print(table(head, rows))


if __name__ == "__main__":
    run_in_group(main, 2)
