"""Train in two processes with more threads than cores. Waiting threads spin, or they sleep.

python tutorials/41_spin.py
"""

import os
import random
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from tqdm import tqdm

from accel_demo.errors import UserError, one_line_errors
from accel_demo.lab import load
from accel_demo.lab.measurements import interval_text, median_interval
from accel_demo.lab.output import warn
from accel_demo.options import Parser
from accel_demo.processes.environment import is_launched
from accel_demo.processes.launch import run_to_end
from accel_demo.show import table

THREADS = str(max(2, os.cpu_count() or 1))
SETTINGS = {
    "`OMP_NUM_THREADS=1`": {"OMP_NUM_THREADS": "1"},
    f"`OMP_NUM_THREADS={THREADS}`": {"OMP_NUM_THREADS": THREADS},
    f"`OMP_NUM_THREADS={THREADS} OMP_WAIT_POLICY=passive`": {
        "OMP_NUM_THREADS": THREADS,
        "OMP_WAIT_POLICY": "passive",
    },
}
COURSE = Path(__file__).parent.parent
LAUNCH = "torchrun --standalone --nproc-per-node 2 tutorials/41_spin.py"
REPEATS, WARM_UP, STEPS = 5, 3, 15


def main() -> None:
    """Measure each setting several times, in a random order in each round."""
    load.begin()
    ms = {name: [] for name in SETTINGS}
    total = REPEATS * len(SETTINGS)
    with tqdm(total=total, desc="spin", unit="launch", disable=None) as progress:
        for _ in range(REPEATS):
            for name in random.sample(list(SETTINGS), len(SETTINGS)):
                result = run_to_end(LAUNCH, cwd=COURSE, **SETTINGS[name])
                if result.returncode != 0:
                    raise UserError(f"`{LAUNCH}` returned {result.returncode}: {result.stderr}")
                processes, milliseconds = result.stdout.split()
                if processes != "2":
                    raise UserError(f"`{LAUNCH}` connected {processes} processes instead of 2")
                ms[name].append(float(milliseconds))
                progress.update()
    print(
        f"2 connected processes on {os.cpu_count()} cores, each with its own model; "
        f"ms per step, medians of {REPEATS} launches\n"
    )
    rows = [
        [name, f"{statistics.median(each):.1f}", interval_text(median_interval(each), digits=1)]
        for name, each in ms.items()
    ]
    print(table(["environment", "ms per step", "90 % interval"], rows))
    warn("slower")


def train() -> None:
    """Train a small network on this rank. Rank 0 prints the world size and the ms per step."""
    dist.init_process_group("gloo")
    layers = [torch.nn.Linear(256, 256), torch.nn.ReLU()] * 4
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seconds = []
    for _ in range(WARM_UP + STEPS):
        started_at = time.perf_counter()
        model(torch.ones(256, 256)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started_at)
    slowest = torch.tensor(statistics.median(seconds[WARM_UP:]))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(dist.get_world_size(), f"{1000 * slowest:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with one_line_errors():
        if is_launched():
            train()
        else:
            Parser(__doc__).parse_args()
            main()
