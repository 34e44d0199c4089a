"""Measure how much longer a training step takes while `accel-demo audit` observes it.

python benchmarks/audit.py

Two connected processes with one thread each train train.py on the CPU. Each repetition starts new
processes, once with and once without the observer, in random order. The result of a run is its
median step time. The observer looks at the content of the first 400 batches only, so a run is
shorter.
"""

import os
import tempfile
from argparse import Namespace
from functools import partial
from pathlib import Path
from statistics import median
from unittest.mock import patch

from measuring import in_turns, main

from accel_demo.lab.measurements import Report, Table
from accel_demo.lab.worker_pool import ON_CPU, WorkerPool
from accel_demo.observer.agent import inject
from accel_demo.observer.events import FOLDER

REPEATS = 11
MODELS = {"tiny_cnn": (60, 128), "resnet18": (15, 16)}  # steps per run, and batch size


def measure(options: Namespace) -> Report:
    tables, added = [], {}
    for model in MODELS:
        sides = {name: partial(step_time, model, name) for name in ("alone", "observed")}
        times = in_turns(sides, options.repeats, model)
        tables.append(Table(f"Step of {model}, 2 processes on cpu", "µs", times, "alone", digits=0))
        pairs = zip(times["observed"], times["alone"], strict=True)
        added[model] = [observed - alone for observed, alone in pairs]
    tables.append(Table("What the observer adds to a step", "µs", added, digits=0))
    return Report(tables, [], {"processes": 2})


def step_time(model: str, side: str, _: int) -> float:
    """Train, and return the median step time in µs."""
    steps, batch_size = MODELS[model]
    images = 2 * steps * batch_size
    choices = {"model": model, "dataset": "synthetic", "max_steps": steps, "test_samples": 64}
    choices |= {"train_samples": images, "batch_size": batch_size}
    with tempfile.TemporaryDirectory() as events:
        variables = inject(dict(os.environ), FOLDER, events) if side == "observed" else {}
        with patch.dict(os.environ, variables), WorkerPool(2, 1, ON_CPU) as pool:
            stamps = pool.run("Accelerate", choices, warm_up=steps // 5)["stamps"]
        observed = [
            log.read_text(encoding="utf-8").count('"kind": "step"')
            for log in Path(events).glob("*.jsonl")
        ]
    if observed != ([steps, steps] if variables else []):
        raise RuntimeError(f"the observer saw {observed} steps of {side}")
    return 1e6 * median(after - before for before, after in zip(stamps, stamps[1:], strict=False))


if __name__ == "__main__":
    main()
