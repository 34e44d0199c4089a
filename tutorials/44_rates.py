"""Measure the time of a DDP step between two machines at several rates of the cable between them.

python tutorials/44_rates.py    # needs root and Linux; takes minutes
"""

import math
import random
import re
from pathlib import Path

from tqdm import tqdm

from accel_demo.errors import UserError, one_line_errors
from accel_demo.lab.measurements import interval_text, median_interval
from accel_demo.options import Parser
from accel_demo.processes.launch import run_to_end
from accel_demo.show import table

RATES = {"25mbit": 25e6, "50mbit": 50e6, "100mbit": 100e6, "not limited": math.inf}  # bits/s
REPEATS = 5
STEP = r"processes 2, gradient bytes (\d+), seconds per step ([\d.]+)"


def main() -> None:
    times = {name: [] for name in RATES}
    size = 0
    total = REPEATS * len(RATES)
    with tqdm(total=total, unit="launch", leave=False, disable=None) as bar:
        for repeat in range(REPEATS):
            for name in random.Random(repeat).sample(list(RATES), len(RATES)):
                size, seconds = seconds_per_step(name)
                times[name].append(seconds)
                bar.update()
    rows = []
    for name, rate in RATES.items():
        expected, measured = 8 * size / rate, sorted(times[name])[REPEATS // 2]
        ratio = f"{measured / expected:.2f}" if expected else "–"
        interval = interval_text(median_interval(times[name]), digits=3)
        rows.append([name, f"{expected:.3f} s", f"{measured:.3f} s", interval, ratio])
    print(f"Each of the 2 processes sends {size:,} bytes per step.\n")
    head = ["rate", "8 · bytes / rate", "median step", "90 % interval", "ratio"]
    print(table(head, rows))


def seconds_per_step(rate: str) -> tuple[int, float]:
    """Return the bytes that each process sends per step, and the seconds per step."""
    limit = "" if RATES[rate] == math.inf else f" --rate {rate}"
    command = f"accel-demo nodes --processes-per-node 1{limit} -- torchrun tutorials/44_step.py"
    ended = run_to_end(command, 120, cwd=Path(__file__).parent.parent)
    match = re.search(STEP, ended.stdout)
    if ended.returncode != 0 or not match:
        raise UserError(f"`{command}` failed: {(ended.stderr.strip().splitlines() or ['?'])[-1]}")
    # A ring all-reduce sends 2 (N - 1) / N of the bytes (page 21). For two processes, that is 1.
    return int(match[1]), float(match[2])


if __name__ == "__main__":
    with one_line_errors():
        Parser(__doc__).parse_args()
        main()
