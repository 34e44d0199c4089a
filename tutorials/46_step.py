"""Measure the time of a step with each method, in a new order in each round.

torchrun --standalone --nproc-per-node 2 tutorials/46_step.py

Rank 0 prints {method: [seconds per step, one number per round]} as a line of JSON.
"""

import json
import random
import time
from itertools import islice

import torch.distributed as dist
from accelerate import Accelerator
from send_less import EVERY, METHODS, make_model, own_batches, train

from accel_demo.processes.devices import use_cpu

ROUNDS = 7


def main():
    accelerator = Accelerator(cpu=use_cpu())
    batches = list(islice(own_batches(1, device=str(accelerator.device)), 2 + EVERY))
    seconds = {method: [] for method in METHODS}
    for number in range(1 + ROUNDS):
        for method in random.Random(number).sample(METHODS, len(METHODS)):
            clock = []
            train(method, make_model(), timed(batches, clock))
            if number:  # the first round also connects the processes
                seconds[method].append((clock[1] - clock[0]) / EVERY)
    if accelerator.is_main_process:
        print(json.dumps({"processes": accelerator.num_processes, "seconds": seconds}), flush=True)
    accelerator.end_training()


def timed(batches: list, clock: list[float]):
    """Yield the batches, and add the time before the third one and the time after the last one.

    The first two steps of PowerSGD are those of DDP.
    """
    for number, batch in enumerate(batches):
        if number == len(batches) - EVERY:
            dist.barrier()
            clock.append(time.perf_counter())
        yield batch
    clock.append(time.perf_counter())


if __name__ == "__main__":
    main()
