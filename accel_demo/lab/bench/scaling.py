"""What two processes gain over one: images per second, and how much of twice as many that is.

accel-demo bench scaling

Each process trains on one thread (or one GPU) with the same batch size, so that two of them do
twice the work of one. Two processes that do not share their gradients show what the machine itself
loses when both cores are busy; the rest is the price of sharing.
"""

import statistics
from concurrent.futures import ThreadPoolExecutor

import torch
from tqdm import tqdm

from accel_demo.lab.bench.crew import Crew
from accel_demo.lab.bench.report import Report, Table

REPEATS = 15
STEPS = 60  # of one run; the first tenth warms up
ALONE, APART, TOGETHER = "1 process", "2 processes, each for itself", "2 processes, one training"


def add_options(parser) -> None:
    parser.add_argument("--model", default="small_cnn", help="see train.py (default: small_cnn)")
    help = "images per process and step (default: 128)"
    parser.add_argument("--batch-size", type=int, default=128, metavar="N", help=help)


def measure(options) -> Report:
    """Images per second of one and two processes, in turns, and their efficiency."""
    rates: dict[str, list[float]] = {ALONE: [], APART: [], TOGETHER: []}
    on_cpu = torch.accelerator.device_count() < 2
    with (
        Crew(1, threads=1, on_cpu=on_cpu) as one,
        Crew(1, threads=1, on_cpu=on_cpu) as other,
        Crew(2, threads=1, on_cpu=on_cpu) as pair,
        ThreadPoolExecutor(2) as both,
    ):
        for _ in tqdm(range(options.repeats), desc="scaling", unit="repeat"):
            rates[ALONE].append(rate([one], options, both))
            rates[APART].append(rate([one, other], options, both))
            rates[TOGETHER].append(rate([pair], options, both))
    efficiency = {
        name: [value / (2 * alone) for value, alone in zip(rates[name], rates[ALONE], strict=True)]
        for name in (APART, TOGETHER)
    }
    medians = {name: statistics.median(values) for name, values in efficiency.items()}
    tables = [
        Table(f"Training {options.model}", "images/s", rates, reference=ALONE, digits=0),
        Table("Efficiency: of twice one process", "share", efficiency, digits=3),
    ]
    device = "on the CPU, one thread per process" if on_cpu else "one GPU per process"
    finding = f"Two processes train {medians[TOGETHER]:.3f} times twice as fast as one ({device})."
    return Report("scaling", tables, [finding], {"efficiency": medians[TOGETHER]})


def rate(crews: list[Crew], options, pool: ThreadPoolExecutor) -> float:
    """Images per second of all crews together, training at the same time."""
    choices = {
        "model": options.model,
        "batch_size": options.batch_size,
        "dataset": "synthetic",
        "train_samples": 2 * STEPS * options.batch_size,
        "test_samples": 64,
        "max_steps": STEPS,
    }
    answers = pool.map(lambda crew: crew.run("Accelerate", choices), crews)
    return sum(
        options.batch_size * answer["processes"] / statistics.mean(answer["wall_seconds"][6:])
        for answer in answers
    )
