"""Measure how much faster training is with more processes: your script, or our training loops.

accel-demo scaling -- torchrun --nproc-per-node 2 train.py
accel-demo scaling --processes 1,2,4 --batch-size 512 --plot scaling.svg

With a script, or a command after --, it runs the script unchanged and without GPUs (--gpu keeps
them), several times in the processes that the command starts and in one, and ends each run after a
few optimizer steps. Files that it overwrites are put back. It prints the step times, and the
speed-up: how many times as many samples per second the processes train on together as one.

Otherwise, it trains with our own loops. Strong scaling splits one global batch among the processes.
Weak scaling gives each process a full batch. Speed-ups are relative to plain PyTorch in one
process. Each repetition measures all cases in random order, in the same worker processes. With at
least three process counts, it fits Amdahl's and Gustafson's laws. The last table compares two
threads with two processes, for work in Python and in torch. It shows the effect of the global
interpreter lock, which allows only one thread at a time to run Python code.
"""

import os
import random

import torch
from tqdm import tqdm

from accel_demo.anatomy import gil
from accel_demo.anatomy.devices import usable_cores
from accel_demo.config import MODELS, TrainConfig
from accel_demo.errors import UserError
from accel_demo.guess import comparison
from accel_demo.lab import hosts
from accel_demo.lab.observed.observation import (
    YOURS,
    add_options,
    add_processes,
    is_about_a_script,
    read_command,
    refuse_options,
)
from accel_demo.lab.output import write_outputs
from accel_demo.lab.scaling import own, tables
from accel_demo.lab.scaling.result import (
    PARALLEL,
    PLAIN,
    ScalingCase,
    ScalingResult,
    fits_of,
    measure_gil,
    scaling_rows,
)
from accel_demo.lab.worker_pool import ON_CPU, WorkerPool, WorkerResult
from accel_demo.options import Parser, command_parser

REPEATS, QUICK_REPEATS = 9, 2
STEPS, QUICK_STEPS = 20, 3  # optimizer steps per training run, including the warm-up
MOST_IMAGES = 1_000_000  # maximum size of the synthetic dataset
OWN_REPEATS, OWN_QUICK_REPEATS = 5, 1  # runs of the reader's script
OURS = "our training loops"


def main(arguments: list[str]) -> int:
    if is_about_a_script(arguments):
        return main_of_script(arguments)
    parser = make_parser()
    options = parser.parse_args(arguments)
    refuse_options(parser, arguments, YOURS)
    counts = sorted({1, *options.processes})
    steps = QUICK_STEPS if options.quick else STEPS
    check(options, counts, steps)

    result = measure(options, counts, steps)
    print(tables.text(result))
    if options.guess is not None:
        print(f"\n{comparison(options.guess, speedup_on_two(result), '×')}")
    write_outputs(options, "scaling", result, tables.draw)
    return 0


def main_of_script(arguments: list[str]) -> int:
    """Measure the speed-up of the reader's script."""
    parser = make_parser(of_script=True)
    options = read_command(parser, arguments, "scaling")
    refuse_options(parser, arguments[: -len(options.command)], OURS)
    result = own.measure_script(options)
    print(tables.text_of_script(result))
    if options.guess is not None:
        print(f"\n{comparison(options.guess, result.rows[1].median_speedup, '×')}")
    write_outputs(options, "scaling", result, tables.draw_own, of_script=True)
    return 0


def make_parser(of_script: bool = False) -> Parser:
    quick = f"{QUICK_REPEATS} repeats of {QUICK_STEPS} steps, or {OWN_QUICK_REPEATS} of your script"
    parser = command_parser("scaling", __doc__, quick)
    if of_script:
        add_processes(parser)
    else:
        help = "process counts to compare, and 1; for your script, one number"
        parser.add_process_counts(help)
    repeats = (OWN_REPEATS, OWN_QUICK_REPEATS) if of_script else (REPEATS, QUICK_REPEATS)
    help = f"how many times to measure each case; for your script, {OWN_REPEATS}"
    parser.add_option("--repeats", repeats[0], help, quick=repeats[1], least=1)
    help = "speed-up of 2 processes: of Accelerate with strong scaling, or of your script"
    parser.add_guess(help)
    parser.begin_group(OURS)
    parser.add_option("--threads", 1, "CPU threads per process", least=1)
    parser.add_option("--model", "small_cnn", "the model to train", choices=MODELS)
    help = "images per step: per process for weak scaling, in total for strong"
    parser.add_option("--batch-size", 128, help, least=1)
    hosts.add_rate(parser)
    parser.begin_group(YOURS)
    help = "optimizer steps to measure in each run"
    parser.add_option("--steps", own.MEASURED, help, least=own.LEAST_STEPS)
    add_options(parser)
    return parser


def check(options, counts: list[int], steps: int) -> None:
    """Check the options before any worker starts. Raises `UserError` if an option is invalid."""
    if options.guess is not None and 2 not in counts:
        raise UserError("--guess is for 2 processes: include 2 in --processes")
    if options.threads > 8 * (os.cpu_count() or 1):
        raise UserError(f"{options.threads} threads are too many for {os.cpu_count()} cores")
    for count in counts:
        if options.batch_size % count:
            message = f"--batch-size {options.batch_size} cannot be divided among {count} processes"
            raise UserError(f"{message}, as strong scaling requires")
    most = MOST_IMAGES // (steps * counts[-1])
    if options.batch_size > most:
        raise UserError(f"--batch-size must be at most {most} here, got {options.batch_size}")
    smallest = options.batch_size // counts[-1]
    if options.model.startswith("resnet") and smallest < 2:
        raise UserError(f"{options.model} needs batches of at least 2 images, got {smallest}")
    hosts.check_rate(options.rate, counts[-1], config_of(options.model))


def speedup_on_two(result: ScalingResult) -> float:
    """Return the median speed-up of Accelerate on two processes, with strong scaling."""
    case = ("strong", "Accelerate", 2)
    [row] = [row for row in result.rows if (row.scaling, row.version, row.processes) == case]
    return row.median_speedup


def scaling_cases(counts: list[int], batch_size: int) -> list[ScalingCase]:
    """Return all cases to measure. With one process, strong and weak scaling are the same case."""
    cases = [ScalingCase(PLAIN, 1, batch_size)]
    for version in PARALLEL:
        for count in counts:
            for batch in sorted({batch_size // count, batch_size}):
                cases.append(ScalingCase(version, count, batch))
    return cases


def measure(options, counts: list[int], steps: int) -> ScalingResult:
    """Measure all cases once per repetition, and then compare threads with processes."""
    cases = scaling_cases(counts, options.batch_size)
    gpus = first_gpus(counts[-1]) if torch.cuda.device_count() >= counts[-1] else ON_CPU
    rates: dict[ScalingCase, list[float]] = {case: [] for case in cases}  # images/s per repetition
    with (
        hosts.limited_hosts(counts[-1], options.rate) as own_hosts,
        WorkerPool(counts[-1], options.threads, gpus, own_hosts) as pool,
    ):
        # Workers import some modules in their first step, so let them train once before measuring.
        first_run = train(pool, cases[-1], options.model, steps=2)
        with tqdm(total=options.repeats * len(cases), desc="scaling", unit="run") as bar:
            for repeat in range(options.repeats):
                for case in random.Random(repeat).sample(cases, len(cases)):
                    training = train(pool, case, options.model, steps)
                    images = training["processes"] * case.batch_size
                    rates[case].append(images / training["seconds_per_step"])
                    bar.update()
    rows = scaling_rows(rates, counts, options.batch_size)
    return ScalingResult(
        processes=counts,
        threads=options.threads,
        device=first_run["device"],
        cores=usable_cores(),
        model=options.model,
        batch_size=options.batch_size,
        steps=steps,
        repeats=options.repeats,
        rows=rows,
        fits=fits_of(rows),
        has_gil=gil.has_gil(),
        gil_rows=measure_gil(1 if options.quick else options.repeats),
        rate=options.rate,
        gradient_bytes=hosts.gradient_bytes(config_of(options.model)),
    )


def config_of(model: str) -> TrainConfig:
    return TrainConfig(model=model, dataset="synthetic")


def first_gpus(count: int) -> str:
    """Return the first `count` visible GPUs, in the format of CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(count)]
    return ",".join(names[:count])


def train(pool: WorkerPool, case: ScalingCase, model: str, steps: int) -> WorkerResult:
    """Train this case once, with one worker of the pool for each of its processes."""
    samples = steps * case.batch_size * case.processes
    choices = {"model": model, "batch_size": case.batch_size, "max_steps": steps}
    choices |= {"dataset": "synthetic", "train_samples": samples, "test_samples": 64}
    warm_up = max(1, steps // 10)
    return pool.run(case.version, choices, warm_up=warm_up, processes=case.processes)
