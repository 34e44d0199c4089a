"""Compare the speed of two processes with twice the speed of one process.

python benchmarks/scaling.py
python benchmarks/scaling.py --quick --accumulate 8

Each process trains on one thread (or one GPU) with the same batch size, so two processes do twice
the work of one. Two independent processes show how much a second busy core slows down the machine.
Two connected processes also wait for each other in each step and average their gradients. With
--accumulate, they do so less often.
"""

from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import methodcaller

import torch
from measuring import in_turns, main

from accel_demo.config import TrainConfig
from accel_demo.lab.measurements import Report, Table
from accel_demo.lab.worker_pool import ON_CPU, WorkerPool
from accel_demo.options import Parser

REPEATS = 15
# A run has 60 micro-batches, but at least 10 steps. The first tenth of the steps is warm-up.
MICRO_BATCHES, LEAST_STEPS = 60, 10
ALONE, APART, TOGETHER = "1 process", "2 processes, each for itself", "2 processes, one training"


def add_options(parser: Parser) -> None:
    help = "micro-batches per optimizer step; gradients are averaged once per step (default: 1)"
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help=help)


def measure(options: Namespace) -> Report:
    steps = max(LEAST_STEPS, MICRO_BATCHES // max(1, options.accumulate))
    config = TrainConfig("synthetic", accumulate=options.accumulate, max_steps=steps)
    images = config.batch_size * config.accumulate  # per process and step
    choices = {"dataset": config.dataset, "train_samples": 2 * steps * images, "test_samples": 64}
    choices |= {"accumulate": config.accumulate, "max_steps": steps}
    on_cpu = torch.cuda.device_count() < 2
    gpus = (ON_CPU,) * 3 if on_cpu else ("0", "1", "0,1")
    with (
        WorkerPool(1, threads=1, gpus=gpus[0]) as first,
        WorkerPool(1, threads=1, gpus=gpus[1]) as second,
        WorkerPool(2, threads=1, gpus=gpus[2]) as pair,
    ):
        for pool in (first, second, pair):  # not measured, because the first step imports modules
            pool.run("Accelerate", {**choices, "max_steps": 2})
        pools = {ALONE: [first], APART: [first, second], TOGETHER: [pair]}
        sides = {name: partial(rate, pools[name], choices, images) for name in pools}
        rates = in_turns(sides, options.repeats, "scaling")
    title = f"Training {config.model}, {images} images per process and step"
    table = Table(title, "images/s", rates, ALONE, digits=0)
    efficiency = table.rows[TOGETHER].median_ratio / 2
    place = "on the CPU, one thread per process" if on_cpu else "one GPU per process"
    finding = f"Two processes reach {efficiency:.1%} of twice the speed of one ({place})."
    return Report([table], [finding], {"processes": pair.processes})


def rate(pools: list[WorkerPool], choices: dict, images: int, _: int) -> float:
    """Train in all pools at the same time, and return their total images per second.

    Only the time in which all pools are training is measured. Raises `RuntimeError` if a pool
    performs fewer than half of its steps in that time.
    """
    steps = choices["max_steps"]
    train = methodcaller("run", "Accelerate", choices, warm_up=steps // 10)
    with ThreadPoolExecutor() as executor:
        results = list(executor.map(train, pools))
    start = max(result["stamps"][0] for result in results)
    end = min(result["stamps"][-1] for result in results)
    total = 0.0
    for result in results:
        within = [stamp for stamp in result["stamps"] if start <= stamp <= end]
        if len(within) < steps // 2:
            raise RuntimeError("the processes did not train at the same time. Try again.")
        total += result["processes"] * images * (len(within) - 1) / (within[-1] - within[0])
    return total


if __name__ == "__main__":
    main()
