"""Measure what more processes gain, and why not more: images/s, speed-up, the serial share.

accel-demo scaling
accel-demo scaling --processes 1,2,4 --batch-size 512 --plot scaling.svg
accel-demo scaling --quick

Strong scaling divides one global batch among the processes; weak scaling gives each of them the
whole batch. Plain PyTorch in one process is the reference. Everything is measured several times, in
turns, in processes that stay alive. At the end Python and torch compute in two threads and in two
processes: that shows the lock that keeps Python's threads from working at the same time.
"""

import os
import random
import statistics

import torch
from tqdm import tqdm

from accel_demo.anatomy import gil
from accel_demo.anatomy.devices import usable_cores
from accel_demo.config import MODELS, TrainConfig
from accel_demo.errors import UserError
from accel_demo.lab import flags
from accel_demo.lab.measurements import median_interval
from accel_demo.lab.scaling import tables
from accel_demo.lab.scaling.fit import amdahl, fit, gustafson
from accel_demo.lab.worker_pool import ON_CPU, WorkerPool

REPEATS, QUICK_REPEATS = 9, 2
STEPS, QUICK_STEPS = 20, 3  # optimizer steps of one run; the first tenth warms up
MOST_IMAGES = 1_000_000  # that the synthetic dataset has for one run
PLAIN, DDP, ACCELERATE = "plain PyTorch", "raw DDP", "Accelerate"
LAWS = {"strong": amdahl, "weak": gustafson}


def main(arguments: list[str]) -> int:
    quick = f"{QUICK_REPEATS} repeats of {QUICK_STEPS} steps"
    parser = flags.parser_of("scaling", __doc__, quick=quick)
    help = "numbers of processes to compare; 1 is always measured (default: 1,2)"
    parser.add_argument("--processes", default="1,2", metavar="N,N", help=help)
    help = "threads of each process, on the CPU (default: 1)"
    parser.add_argument("--threads", type=int, default=1, metavar="N", help=help)
    help = f"how often everything is measured, in turns (default: {REPEATS})"
    parser.add_argument("--repeats", type=int, metavar="N", help=help)
    help = "the network to train (default: small_cnn)"
    parser.add_argument("--model", default="small_cnn", choices=MODELS, help=help)
    help = "images per process (weak), and of all processes together (strong) (default: 128)"
    parser.add_argument("--batch-size", type=int, default=128, metavar="N", help=help)
    options = flags.read(parser, arguments)
    counts = sorted({1, *flags.process_counts(options.processes)})
    if options.repeats is None:
        options.repeats = QUICK_REPEATS if options.quick else REPEATS
    steps = QUICK_STEPS if options.quick else STEPS
    check(options, counts, steps)

    found = measure(options, counts, steps)
    found["gil"] = measure_gil(1 if options.quick else min(options.repeats, gil.REPEATS))
    print(tables.text(found))
    if options.json:
        flags.write_json(options.json, found)
    if options.plot:
        tables.draw(found, options.plot)
    return 0


def check(options, counts: list[int], steps: int) -> None:
    """Raise `UserError` for what would only be found out once the workers are there."""
    for name in ("threads", "repeats", "batch_size"):
        if getattr(options, name) < 1:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} must be at least 1, got {getattr(options, name)}")
    if options.threads > 8 * (os.cpu_count() or 1):
        raise UserError(f"{options.threads} threads are too many for {os.cpu_count()} cores")
    for count in counts:
        if options.batch_size % count:
            raise UserError(
                f"strong scaling divides the batch among the processes: --batch-size "
                f"{options.batch_size} is no multiple of {count}"
            )
    most = MOST_IMAGES // (steps * counts[-1])
    if options.batch_size > most:
        raise UserError(f"--batch-size must be at most {most} here, got {options.batch_size}")
    smallest = options.batch_size // counts[-1]
    if options.model.startswith("resnet") and smallest < 2:
        raise UserError(f"{options.model} takes batches of two images or more: {smallest} is left")


def cases_for(counts: list[int], batch_size: int) -> list[tuple[str, int, int]]:
    """(telling, processes, batch per process): with one process strong and weak are the same."""
    cases = [(PLAIN, 1, batch_size)]
    for telling in (DDP, ACCELERATE):
        for count in counts:
            batches = {batch_size // count, batch_size}
            cases += [(telling, count, batch) for batch in sorted(batches)]
    return cases


def measure(options, counts: list[int], steps: int) -> dict:
    """Images per second of every case, one per repeat, and what follows from them."""
    cases = cases_for(counts, options.batch_size)
    has_gpus = torch.cuda.device_count() >= counts[-1]
    rates: dict[tuple, list[float]] = {case: [] for case in cases}
    connected: dict[tuple, int] = {}
    gpus = first_gpus(counts[-1]) if has_gpus else ON_CPU
    with WorkerPool(counts[-1], options.threads, gpus) as pool:
        # What is imported at a worker's first step is not part of any measurement.
        run(pool, (ACCELERATE, counts[-1], options.batch_size), options.model, steps=2)
        total = options.repeats * len(cases)
        with tqdm(total=total, desc="scaling", unit="run") as bar:
            for repeat in range(options.repeats):
                for case in random.Random(repeat).sample(cases, len(cases)):
                    answer = run(pool, case, options.model, steps)
                    images = answer["processes"] * case[2]
                    rates[case].append(images / answer["seconds_per_step"])
                    connected[case] = answer["processes"]
                    bar.update()
    rows = rows_of(rates, connected, counts, options.batch_size)
    return {
        "processes": counts,
        "threads": options.threads,
        "device": answer["device"],
        "cores": usable_cores(),
        "model": options.model,
        "batch_size": options.batch_size,
        "steps": steps,
        "repeats": options.repeats,
        "rows": rows,
        "fits": fits_of(rows),
    }


def first_gpus(count: int) -> str:
    """So many of the GPUs that this process sees, in the form of CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(count)]
    return ",".join(names[:count])


def run(pool: WorkerPool, case: tuple[str, int, int], model: str, steps: int) -> dict:
    """Train once. The pool raises where other processes, threads or devices took part."""
    telling, count, batch_size = case
    choices = {"model": model, "batch_size": batch_size, "max_steps": steps, "test_samples": 64}
    choices |= {"dataset": "synthetic", "train_samples": steps * batch_size * count}
    TrainConfig(**choices)
    return pool.run(telling, choices, warm_up=max(1, steps // 10), processes=count)


def rows_of(rates: dict, connected: dict, counts: list[int], batch_size: int) -> list[dict]:
    """A row for each scaling, telling and count. Speed-ups are to plain PyTorch, by repeat."""
    reference = rates[PLAIN, 1, batch_size]
    rows = []
    for scaling in LAWS:
        for telling in (PLAIN, DDP, ACCELERATE):
            for count in counts if telling != PLAIN else [1]:
                batch = batch_size // count if scaling == "strong" else batch_size
                values = rates[telling, count, batch]
                speedups = [one / plain for one, plain in zip(values, reference, strict=True)]
                rows.append(
                    {
                        "scaling": scaling,
                        "telling": telling,
                        "processes": connected[telling, count, batch],
                        "batch_size": batch,
                        "images_per_second": values,
                        "speedups": speedups,
                        "speedup": statistics.median(speedups),
                        "interval": median_interval(speedups),
                        "efficiency": statistics.median(speedups) / count,
                    }
                )
    return rows


def fits_of(rows: list[dict]) -> list[dict]:
    """The serial share of each scaling and telling that ran on several counts of processes.

    A law compares a program with itself: here each telling with its own run on one process.
    """
    fits = []
    for scaling, law in LAWS.items():
        for telling in (DDP, ACCELERATE):
            own = [row for row in rows if (row["scaling"], row["telling"]) == (scaling, telling)]
            if len(own) < 2:
                continue
            one = own[0]["images_per_second"]
            speedups = {
                row["processes"]: [
                    many / alone for many, alone in zip(row["images_per_second"], one, strict=True)
                ]
                for row in own
            }
            fits.append({"scaling": scaling, "telling": telling, **fit(law, speedups)})
    return fits


def measure_gil(repeats: int) -> dict:
    """Threads against processes, for work in Python and in torch: speed-ups and cores busy."""
    measured = gil.measure(repeats)
    found = {}
    for kind, ways in measured.items():
        alone = [seconds for seconds, _ in ways[gil.WAYS[0]]]
        found[kind] = {
            way: {
                "speedup": gil.speedups(ways)[way],
                "speedups": [
                    one / seconds for one, (seconds, _) in zip(alone, values, strict=True)
                ],
                "cores_busy": gil.cores_busy(values),
            }
            for way, values in ways.items()
        }
    return {"has_gil": gil.has_gil(), "repeats": repeats, "work": found}
