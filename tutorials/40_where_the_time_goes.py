"""Count the all-reduces that start during backward, and find the rank that waits longest.

python tutorials/40_where_the_time_goes.py
"""

import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from accel_demo.processes.group import run_in_group
from accel_demo.show import table

LATE = 0.25  # seconds that rank 1 sleeps in each step
STEPS = 3  # more than one, because DDP rebuilds its buckets after the first step


def main(device: torch.device) -> None:
    rows = []
    for bucket_cap_mb in (0.05, 0.5, 25):
        early, _, _ = train(device, bucket_cap_mb)
        rows.append([bucket_cap_mb, len(early), sum(early)])
    seconds = [None] * dist.get_world_size()
    dist.all_gather_object(seconds, train(device, 25, LATE)[1:])
    if dist.get_rank() == 0:
        print(table(["bucket_cap_mb", "all-reduces", "start during backward"], rows))
        ranks = range(len(seconds))
        slow, waiting = (max(ranks, key=lambda rank: seconds[rank][i]) for i in (0, 1))
        print(f"\nRank 1 is delayed. Rank {slow} computes longest, rank {waiting} waits longest.")


def train(device: torch.device, bucket_cap_mb: float, late: float = 0.0) -> tuple:
    """Train for `STEPS` steps. Return (early, seconds computed, seconds waited).

    `early` has one item per all-reduce of the last step: True if it started during backward.
    The seconds are sums over all steps on this rank.
    """
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256, device=device) for _ in range(8)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=bucket_cap_mb)
    is_complete, early = False, []
    started_at = computed = waited = 0.0

    def on_last_gradient(gradient):  # backward computes the first layer's gradient last
        nonlocal is_complete
        is_complete = True

    def on_bucket(group, bucket):  # DDP calls this instead of its default all-reduce
        nonlocal started_at
        early.append(not is_complete)
        started_at = time.perf_counter()
        return allreduce_hook(group, bucket)

    layers[0].weight.register_hook(on_last_gradient)
    model.register_comm_hook(None, on_bucket)
    for _ in range(STEPS):
        is_complete, early = False, []
        dist.barrier()
        step_started_at = time.perf_counter()
        loss = model(torch.randn(16, 256, device=device)).sum()
        time.sleep(late * dist.get_rank())
        loss.backward()
        computed += started_at - step_started_at  # until the last bucket was ready
        waited += time.perf_counter() - started_at
    return early, computed, waited


if __name__ == "__main__":
    run_in_group(main, 2)
