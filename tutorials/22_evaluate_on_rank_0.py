"""Train, evaluate and wait at a barrier. Find out in which cases the ranks wait for each other.

python tutorials/22_evaluate_on_rank_0.py
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_demo.processes.group import run_in_group
from accel_demo.show import table

TIME_LIMIT = 3  # seconds that a collective waits; by default, gloo waits for 30 minutes
CASES = [  # (last layer, ranks that evaluate, unwrap the model, barrier after each epoch)
    (nn.Identity, [0], False, True),
    (nn.BatchNorm1d, [0], False, True),
    (nn.BatchNorm1d, [0], False, False),
    (nn.BatchNorm1d, [0], True, True),
    (nn.BatchNorm1d, [0, 1], False, True),
]


def main(device: torch.device) -> None:
    rows = []
    for layer, ranks, unwrap, barrier in CASES:
        call = "`ddp.module(inputs)`" if unwrap else "`ddp(inputs)`"
        network = nn.Sequential(nn.Linear(4, 4), layer(4)).to(device)
        inputs = torch.randn(8, 4, device=device)
        result = train_and_evaluate(network, ranks, unwrap, barrier, inputs)
        cells = [layer.__name__, " and ".join(map(str, ranks)), call, "yes" if barrier else "no"]
        rows.append([*cells, result])
    if dist.get_rank() == 0:
        head = ["last layer", "evaluates on rank", "evaluates with", "`dist.barrier()`", "result"]
        print(table(head, rows))


def train_and_evaluate(
    network, ranks: list[int], unwrap: bool, barrier: bool, inputs: torch.Tensor
) -> str:
    """Train for three epochs of two steps, evaluating after each. Return how it ended here."""
    dist.barrier()  # wait for a rank on which the case before ended with an error
    group = dist.new_group(timeout=timedelta(seconds=TIME_LIMIT))
    ddp = DistributedDataParallel(network, process_group=group)
    for epoch in (1, 2, 3):
        started = time.monotonic()
        try:
            ddp.train()
            for _ in range(2):
                ddp(inputs).sum().backward()
            if dist.get_rank() in ranks:
                ddp.eval()
                with torch.no_grad():
                    ddp.module(inputs) if unwrap else ddp(inputs)
            if barrier:
                dist.barrier(group)
        except RuntimeError:
            if time.monotonic() - started < 0.9 * TIME_LIMIT:
                raise
            return f"error in epoch {epoch} of 3, after {TIME_LIMIT} s"
    return "completes three epochs"


if __name__ == "__main__":
    run_in_group(main, 2)
