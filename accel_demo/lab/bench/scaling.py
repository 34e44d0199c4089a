"""What two processes gain over one: images per second, and how much of twice as many that is.

accel-demo bench scaling

Each process trains on one thread (or one GPU) with the same batch size, so that two of them do
twice the work of one. Two processes that do not share their gradients show what the machine itself
loses when both cores are busy; the rest is the price of sharing, and of waiting for the slower one
at every step. `--accumulate` shares less often.
"""

import statistics
from concurrent.futures import ThreadPoolExecutor

import torch
from tqdm import tqdm

from accel_demo.config import MODELS, TrainConfig
from accel_demo.lab.measurements import Report, Table
from accel_demo.lab.worker_pool import ON_CPU, WorkerPool

REPEATS = 15
MICRO_BATCHES, LEAST_STEPS = 60, 10  # of one run; the first tenth of its steps warms up
ALONE, APART, TOGETHER = "1 process", "2 processes, each for itself", "2 processes, one training"


def add_options(parser) -> None:
    help = "the network to train (default: small_cnn)"
    parser.add_argument("--model", default="small_cnn", choices=MODELS, help=help)
    help = "images per process and micro-batch (default: 128)"
    parser.add_argument("--batch-size", type=int, default=128, metavar="N", help=help)
    help = "micro-batches per optimizer step; gradients are shared once per step (default: 1)"
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help=help)


def measure(options) -> Report:
    """Images per second of one and two processes, in turns, and their efficiency."""
    choices = {"model": options.model, "batch_size": options.batch_size, "dataset": "synthetic"}
    steps = max(LEAST_STEPS, MICRO_BATCHES // max(1, options.accumulate))
    images = 2 * steps * options.batch_size * options.accumulate
    choices |= {"accumulate": options.accumulate, "max_steps": steps}
    choices |= {"train_samples": max(0, images), "test_samples": 64}
    TrainConfig(**choices)  # what cannot be is said before anything is started
    on_cpu = torch.cuda.device_count() < 2
    first, second, both = (ON_CPU,) * 3 if on_cpu else ("0", "1", "0,1")
    rates: dict[str, list[float]] = {ALONE: [], APART: [], TOGETHER: []}
    with (
        WorkerPool(1, threads=1, gpus=first) as one,
        WorkerPool(1, threads=1, gpus=second) as other,
        WorkerPool(2, threads=1, gpus=both) as pair,
        ThreadPoolExecutor(2) as executor,
    ):
        pools = {ALONE: [one], APART: [one, other], TOGETHER: [pair]}
        for pool in (one, other, pair):  # what is imported at the first step is imported now
            pool.run("Accelerate", {**choices, "max_steps": 2})
        for repeat in tqdm(range(options.repeats), desc="scaling", unit="repeat"):
            for name in list(pools) if repeat % 2 else list(pools)[::-1]:
                rates[name].append(rate(pools[name], choices, executor))
    efficiency = {
        name: [value / (2 * alone) for value, alone in zip(rates[name], rates[ALONE], strict=True)]
        for name in (APART, TOGETHER)
    }
    medians = {name: statistics.median(values) for name, values in efficiency.items()}
    per_step = f"{options.batch_size * options.accumulate} images per process and step"
    device = "on the CPU, one thread per process" if on_cpu else "one GPU per process"
    tables = [
        Table(f"Training {options.model}, {per_step}", "images/s", rates, ALONE, digits=0),
        Table("Efficiency: the share of twice one process", "share", efficiency, digits=3),
    ]
    finding = f"Two processes reach {medians[TOGETHER]:.1%} of twice the speed of one ({device})."
    facts = {"efficiency": medians[TOGETHER], "processes": pair.processes}
    return Report("scaling", tables, [finding], facts)


def rate(pools: list[WorkerPool], choices: dict, executor: ThreadPoolExecutor) -> float:
    """Images per second of all pools together, while every one of them is training.

    Raises `RuntimeError` where they trained at different times.
    """
    steps = choices["max_steps"]
    options = {"warm_up": steps // 10}
    runs = [executor.submit(pool.run, "Accelerate", choices, **options) for pool in pools]
    answers = [run.result() for run in runs]
    start = max(answer["stamps"][0] for answer in answers)
    end = min(answer["stamps"][-1] for answer in answers)
    images_per_second = 0.0
    for answer in answers:
        within = [stamp for stamp in answer["stamps"] if start <= stamp <= end]
        if len(within) < steps // 2:
            raise RuntimeError("the processes did not train at the same time: try again")
        steps_per_second = (len(within) - 1) / (within[-1] - within[0])
        images_per_step = answer["processes"] * choices["batch_size"] * choices["accumulate"]
        images_per_second += images_per_step * steps_per_second
    return images_per_second
