"""Compare how long a fused AdamW step, as in train.py, and torch's default step take.

accel-demo bench optimizer
accel-demo bench optimizer --quick --json optimizer.json

Only `optimizer.step()` is measured, with random gradients. It runs on a GPU if there is one, and
otherwise on one CPU thread. Both optimizers update the same parameters and are measured
alternately.
"""

import time
from argparse import Namespace

import torch
from tqdm import tqdm

from accel_demo.config import TrainConfig
from accel_demo.lab.bench.limit import wait_for
from accel_demo.lab.measurements import Report, Table
from accel_demo.models import make_model
from accel_demo.processes.devices import own_device

REPEATS = 15
STEPS = {"small_cnn": 100, "vgg11": 4, "resnet101": 4}  # steps per measurement
FUSED = {"unfused": None, "fused": True}


def measure(options: Namespace) -> Report:
    device = own_device()
    torch.set_num_threads(1)
    place = "1 thread" if device.type == "cpu" else device.type
    tables, findings = [], []
    for model_name, steps in STEPS.items():
        rows = milliseconds_per_step(model_name, steps, options.repeats, device)
        table = Table(f"AdamW's step for {model_name}, {place}", "ms", rows, "unfused", 2)
        tables.append(table)
        ratio = table.rows["fused"].median_ratio
        findings.append(
            f"{model_name}: a fused step takes {ratio:.2f} x the time of an unfused one."
        )
    return Report(tables, findings)


def milliseconds_per_step(
    model_name: str, steps: int, repeats: int, device: torch.device
) -> dict[str, list[float]]:
    """Return {optimizer: [milliseconds per step in each repetition]}."""
    model = make_model(TrainConfig(model=model_name)).to(device)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), fused=fused) for name, fused in FUSED.items()
    }
    milliseconds: dict[str, list[float]] = {name: [] for name in optimizers}
    for optimizer in optimizers.values():
        optimizer.step()  # not measured, because the first step creates the optimizer's state
    for _ in tqdm(range(repeats), desc=model_name, unit="repeat", leave=False):
        for name, optimizer in optimizers.items():
            wait_for(device)
            started_at = time.perf_counter()
            for _ in range(steps):
                optimizer.step()
            wait_for(device)
            milliseconds[name].append(1e3 * (time.perf_counter() - started_at) / steps)
    return milliseconds
