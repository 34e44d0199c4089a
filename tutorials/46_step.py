"""Measure the time of a step with each method, in a new order in each round.

torchrun --standalone --nproc-per-node 2 tutorials/46_step.py

Rank 0 prints a line of JSON: the seconds per step in each round, and the bytes per step.
"""

import json
import random
import time
from collections.abc import Iterator
from itertools import islice

import torch.distributed as dist
from accelerate import Accelerator
from send_less import EVERY, METHODS, make_model, own_batches, train

from accel_demo.anatomy.ddp.flight_recorder import recorded
from accel_demo.processes.devices import use_cpu

ROUNDS = 25


def main():
    accelerator = Accelerator(cpu=use_cpu())
    batches = list(islice(own_batches(1, device=str(accelerator.device)), 2 + EVERY))
    seconds, sent = {method: [] for method in METHODS}, {}
    for number in range(1 + ROUNDS):
        # The first round is not measured: it also connects the processes.
        order = random.Random(number).sample(METHODS, len(METHODS)) if number else METHODS
        for method in order:
            measured = []
            train(method, make_model(), observed(batches, measured))
            if number:
                seconds[method].append(measured[0] / EVERY)
            sent[method] = measured[1] / EVERY
    if accelerator.is_main_process:
        result = {"processes": accelerator.num_processes, "seconds": seconds, "bytes": sent}
        print(json.dumps(result), flush=True)
    accelerator.end_training()


def observed(batches: list, measured: list[float]) -> Iterator[tuple]:
    """Yield the batches. Add the seconds and the bytes of the steps after the first two.

    The first two steps of PowerSGD are those of DDP.
    """
    yield from batches[:-EVERY]
    dist.barrier()
    with recorded() as collectives:
        started_at = time.perf_counter()
        yield from batches[-EVERY:]
        measured.append(time.perf_counter() - started_at)
    measured.append(sum(each.size for each in collectives if each.name == "all_reduce"))


if __name__ == "__main__":
    main()
