"""Compare how long a training step takes in plain PyTorch, raw DDP and Accelerate.

python benchmarks/overhead.py
python benchmarks/overhead.py --quick --json overhead.json

The unmodified train files run in one process and in two processes with one thread each. They train
the default model, and a tiny model that makes the overhead visible. The result of a run is its
median step time on a CPU, and its mean step time on a GPU.
"""

from argparse import Namespace
from functools import partial
from statistics import median

from measuring import in_turns, main

from accel_demo.lab.measurements import Report, Table
from accel_demo.lab.worker_pool import WorkerPool
from accel_demo.wording import counted

REPEATS = 21
BATCH_SIZE = 128
STEPS = {"tiny_cnn": 60, "small_cnn": 20}  # steps per run; the first tenth is warm-up
VERSIONS = {1: ["plain PyTorch", "raw DDP", "Accelerate"], 2: ["raw DDP", "Accelerate"]}


def measure(options: Namespace) -> Report:
    tables, added = [], {}
    with WorkerPool(1, threads=1) as alone, WorkerPool(2, threads=1) as pair:
        for model in STEPS:
            for pool in (alone, pair):
                reference, *_ = versions = VERSIONS[pool.processes]
                # This run is not measured, because a worker's first step imports modules.
                device = pool.run("Accelerate", choices(model))["device"]
                name = f"{model}, {counted(pool.processes, 'process')} on {device}"
                sides = {version: partial(step_time, pool, version, model) for version in versions}
                times = in_turns(sides, options.repeats, name)
                tables.append(Table(f"Step of {name}", "µs", times, reference, digits=0))
                pairs = zip(times["Accelerate"], times[reference], strict=True)
                row = f"{name}: Accelerate less {reference}"
                added[row] = [accelerate - without for accelerate, without in pairs]
    tables.append(Table("What Accelerate adds to a step", "µs", added, digits=0))
    return Report(tables, [], {"processes": pair.processes})


def choices(model: str) -> dict:
    """Return TrainConfig fields for a run of `STEPS[model]` steps, in one process or in two."""
    fields = {"model": model, "dataset": "synthetic", "max_steps": STEPS[model]}
    images = 2 * STEPS[model] * BATCH_SIZE
    return {**fields, "train_samples": images, "test_samples": 64, "batch_size": BATCH_SIZE}


def step_time(pool: WorkerPool, version: str, model: str, _: int) -> float:
    """Train, and return the median step time in µs, which short disturbances hardly affect.

    On a GPU, return the mean instead: Python does not wait until the GPU has finished a step, so
    the measured times of single steps are meaningless.
    """
    result = pool.run(version, choices(model), warm_up=STEPS[model] // 10)
    stamps = result["stamps"]
    times = [after - before for before, after in zip(stamps, stamps[1:], strict=False)]
    return 1e6 * (median(times) if result["device"] == "cpu" else result["seconds_per_step"])


if __name__ == "__main__":
    main()
