"""Measure the optimizer's step: AdamW fused, as train.py has it, against AdamW as torch chooses.

accel-demo bench optimizer

`optimizer.step()` alone, with random gradients: on a GPU if there is one, else on one thread of the
CPU. Both optimizers own the same parameters and take turns.
"""

import statistics
import time

import torch
from tqdm import tqdm

from accel_demo.config import TrainConfig
from accel_demo.lab.bench.limit import wait_for
from accel_demo.lab.measurements import Report, Table
from accel_demo.models import make_model
from accel_demo.processes.connect import own_device

REPEATS = 15
STEPS = {"small_cnn": 100, "vgg11": 4, "resnet101": 4}  # of one measurement
FUSED = {"unfused": None, "fused": True}


def add_options(parser) -> None:
    """Add no option: those that every benchmark has are enough."""


def measure(options) -> Report:
    """Return a table of milliseconds per step for each network, and the ratios as sentences."""
    device = own_device()
    torch.set_num_threads(1)
    place = "1 thread" if device.type == "cpu" else device.type
    tables, findings, facts = [], [], {}
    for network, steps in STEPS.items():
        rows = {
            name: [1e3 * seconds for seconds in measured]
            for name, measured in in_turns(network, steps, options.repeats, device).items()
        }
        tables.append(Table(f"AdamW's step for {network}, {place}", "ms", rows, "unfused", 2))
        facts[network] = statistics.median(tables[-1].ratios("fused"))
        findings.append(
            f"{network}: a fused step takes {facts[network]:.2f} x the unfused one's time."
        )
    return Report("optimizer", tables, findings, {"ratios": facts})


def in_turns(
    network: str, steps: int, repeats: int, device: torch.device
) -> dict[str, list[float]]:
    """Return the seconds per step of each repeat, by name of the optimizer."""
    model = make_model(TrainConfig(model=network)).to(device)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), fused=fused) for name, fused in FUSED.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    for optimizer in optimizers.values():
        optimizer.step()  # the first one makes the optimizer's state
    for _ in tqdm(range(repeats), desc=network, unit="repeat", leave=False):
        for name, optimizer in optimizers.items():
            wait_for(device)
            started_at = time.perf_counter()
            for _ in range(steps):
                optimizer.step()
            wait_for(device)
            seconds[name].append((time.perf_counter() - started_at) / steps)
    return seconds
