"""Compare the speed of two processes with twice the speed of one process.

accel-demo bench scaling
accel-demo bench scaling --quick --accumulate 8

Each process trains on one thread (or one GPU) with the same batch size, so two processes do twice
the work of one. Two independent processes show how much slower the machine itself becomes when two
cores are busy. Two connected processes are even slower, because in each step they wait for each
other and average their gradients. With --accumulate, this happens less often.
"""

from argparse import ArgumentParser, Namespace
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from tqdm import tqdm

from accel_demo.config import MODELS, TrainConfig
from accel_demo.lab.measurements import Report, Table
from accel_demo.lab.worker_pool import ON_CPU, WorkerPool

REPEATS = 15
# A run has 60 micro-batches, but at least 10 steps. The first tenth of the steps is warm-up.
MICRO_BATCHES, LEAST_STEPS = 60, 10
ALONE, APART, TOGETHER = "1 process", "2 processes, each for itself", "2 processes, one training"


def add_options(parser: ArgumentParser) -> None:
    help = "the model to train (default: small_cnn)"
    parser.add_argument("--model", default="small_cnn", choices=MODELS, help=help)
    help = "images per micro-batch in each process (default: 128)"
    parser.add_argument("--batch-size", type=int, default=128, metavar="N", help=help)
    help = "micro-batches per optimizer step; gradients are averaged once per step (default: 1)"
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help=help)


def measure(options: Namespace) -> Report:
    choices = {"model": options.model, "batch_size": options.batch_size, "dataset": "synthetic"}
    steps = max(LEAST_STEPS, MICRO_BATCHES // max(1, options.accumulate))
    images = 2 * steps * options.batch_size * options.accumulate
    choices |= {"accumulate": options.accumulate, "max_steps": steps}
    choices |= {"train_samples": max(0, images), "test_samples": 64}
    TrainConfig(**choices)  # checks the options before any process is started
    on_cpu = torch.cuda.device_count() < 2
    gpus = (ON_CPU,) * 3 if on_cpu else ("0", "1", "0,1")
    rates: dict[str, list[float]] = {ALONE: [], APART: [], TOGETHER: []}
    with (
        WorkerPool(1, threads=1, gpus=gpus[0]) as first,
        WorkerPool(1, threads=1, gpus=gpus[1]) as second,
        WorkerPool(2, threads=1, gpus=gpus[2]) as pair,
        ThreadPoolExecutor(2) as executor,
    ):
        pools = {ALONE: [first], APART: [first, second], TOGETHER: [pair]}
        for pool in (first, second, pair):  # not measured, because the first step imports modules
            pool.run("Accelerate", {**choices, "max_steps": 2})
        for repeat in tqdm(range(options.repeats), desc="scaling", unit="repeat"):
            for name in list(pools) if repeat % 2 else list(pools)[::-1]:
                rates[name].append(rate(pools[name], choices, executor))
    efficiency = {
        name: [value / (2 * alone) for value, alone in zip(rates[name], rates[ALONE], strict=True)]
        for name in (APART, TOGETHER)
    }
    per_step = f"{options.batch_size * options.accumulate} images per process and step"
    device = "on the CPU, one thread per process" if on_cpu else "one GPU per process"
    tables = [
        Table(f"Training {options.model}, {per_step}", "images/s", rates, ALONE, digits=0),
        Table("Efficiency: the share of twice one process", "share", efficiency, digits=3),
    ]
    median = tables[1].rows[TOGETHER].median
    finding = f"Two processes reach {median:.1%} of twice the speed of one ({device})."
    return Report(tables, [finding], {"processes": pair.processes})


def rate(pools: list[WorkerPool], choices: dict, executor: ThreadPoolExecutor) -> float:
    """Train in all pools at the same time, and return their total images per second.

    Only the time in which all pools are training is measured. Raises `RuntimeError` if a pool
    performs fewer than half of its steps in that time.
    """
    steps = choices["max_steps"]
    train = partial(WorkerPool.run, version="Accelerate", choices=choices, warm_up=steps // 10)
    results = list(executor.map(train, pools))
    start = max(result["stamps"][0] for result in results)
    end = min(result["stamps"][-1] for result in results)
    images_per_second = 0.0
    for result in results:
        within = [stamp for stamp in result["stamps"] if start <= stamp <= end]
        if len(within) < steps // 2:
            raise RuntimeError("the processes did not train at the same time. Try again.")
        steps_per_second = (len(within) - 1) / (within[-1] - within[0])
        images_per_step = result["processes"] * choices["batch_size"] * choices["accumulate"]
        images_per_second += images_per_step * steps_per_second
    return images_per_second
