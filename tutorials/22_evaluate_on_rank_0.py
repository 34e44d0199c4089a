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
CASES = [  # (last layer, ranks that evaluate, unwrap the model)
    (nn.Identity, [0], False),
    (nn.BatchNorm1d, [0], False),
    (nn.BatchNorm1d, [0], True),
    (nn.BatchNorm1d, [0, 1], False),
]


def main(device: torch.device) -> None:
    rows = []
    for layer, ranks, unwrap in CASES:
        call = "`ddp.module(inputs)`" if unwrap else "`ddp(inputs)`"
        network = nn.Sequential(nn.Linear(4, 4), layer(4)).to(device)
        result = train_and_evaluate(network, ranks, unwrap, torch.randn(8, 4, device=device))
        rows.append([layer.__name__, " and ".join(map(str, ranks)), call, result])
    if dist.get_rank() == 0:
        print(table(["last layer", "evaluates on rank", "evaluates with", "result"], rows))


def train_and_evaluate(network, ranks: list[int], unwrap: bool, inputs: torch.Tensor) -> str:
    """Train for three epochs, evaluating after each. Return how it ended on this rank."""
    group = dist.new_group(timeout=timedelta(seconds=TIME_LIMIT))
    ddp = DistributedDataParallel(network, process_group=group)
    for _ in range(3):
        started = time.monotonic()
        try:
            ddp.train()
            ddp(inputs).sum().backward()
            if dist.get_rank() in ranks:
                ddp.eval()
                with torch.no_grad():
                    ddp.module(inputs) if unwrap else ddp(inputs)
            dist.barrier(group)
        except RuntimeError:
            if time.monotonic() - started < 0.9 * TIME_LIMIT:
                raise
            return f"error after {TIME_LIMIT} s, the time limit"
    return "completes three epochs"


if __name__ == "__main__":
    run_in_group(main, 2)
