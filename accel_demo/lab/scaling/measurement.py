"""Measure the speed of each version of our training loop, and of threads and processes."""

import os
import random
import statistics

import torch

from accel_demo.anatomy import gil
from accel_demo.anatomy.devices import usable_cores
from accel_demo.config import TrainConfig
from accel_demo.lab import hosts
from accel_demo.lab.measurements import median_interval
from accel_demo.lab.scaling.result import (
    GilRow,
    ScalingCase,
    ScalingResult,
    fits_of,
    ratios,
    scaling_cases,
    scaling_rows,
)
from accel_demo.lab.worker_pool import ON_CPU, WorkerPool, WorkerResult
from accel_demo.progress_bar import ProgressBar


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
        with ProgressBar("scaling", "run", total=options.repeats * len(cases)) as bar:
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
        gradient_bytes=hosts.gradient_bytes(TrainConfig(model=options.model)),
    )


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


def measure_gil(repeats: int) -> list[GilRow]:
    """Compare the speed of threads and processes, for work in Python and in torch."""
    rows = []
    for work, measured in gil.measure(repeats).items():
        seconds = {workers: [time.seconds for time in times] for workers, times in measured.items()}
        one_after_the_other = next(iter(seconds.values()))
        for workers, times in measured.items():
            speedups = ratios(one_after_the_other, seconds[workers])
            median, interval = statistics.median(speedups), median_interval(speedups)
            busy = gil.cores_busy(times)
            rows.append(GilRow(work, workers, speedups, median, interval, busy))
    return rows
