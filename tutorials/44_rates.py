"""Measure the time of a DDP step between two machines at several rates of the cable between them.

python tutorials/44_rates.py    # needs root and Linux; takes minutes
"""

import math
import random
import re
from pathlib import Path

from tqdm import tqdm

from accel_demo import show
from accel_demo.errors import UserError, one_line_errors
from accel_demo.lab.measurements import interval_text, median_interval
from accel_demo.options import Parser
from accel_demo.processes.launch import run_to_end

RATES = {"10mbit": 10e6, "50mbit": 50e6, "100mbit": 100e6, "not limited": math.inf}  # bits/s
REPEATS = 5
# An Ethernet frame of 1,514 bytes has headers of Ethernet (14), IPv4 (20) and TCP (32).
HEADERS = 66 / (1514 - 66)  # relative to the bytes that they carry
STEP = r"processes 2, gradient bytes (\d+), seconds per step ([\d.]+)"


def main(plot: Path | None) -> None:
    times = {name: [] for name in RATES}
    size = 0
    with tqdm(total=REPEATS * len(RATES), unit="launch", leave=False) as bar:
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
    print(show.table(head, rows))
    if plot:
        draw(size, times, plot)


def seconds_per_step(rate: str) -> tuple[int, float]:
    """Return the bytes that each process sends per step, and the seconds per step."""
    limit = "" if RATES[rate] == math.inf else f" --rate {rate}"
    command = f"accel-demo nodes --processes-per-node 1{limit} -- torchrun tutorials/44_step.py"
    ended = run_to_end(command, 120)
    match = re.search(STEP, ended.stdout)
    if ended.returncode != 0 or not match:
        raise UserError(f"`{command}` failed: {(ended.stderr.strip().splitlines() or ['?'])[-1]}")
    # A ring all-reduce sends 2 (N - 1) / N of the bytes (page 21). For two processes, that is 1.
    return int(match[1]), float(match[2])


def draw(size: int, times: dict[str, list[float]], file: Path) -> None:
    """Draw the measured times and their parts, all divided by 8 · bytes / rate."""
    figure = show.new_figure(7, 2.8)
    axes = figure.subplots()
    limited = [name for name, rate in RATES.items() if rate != math.inf]
    unlimited = sorted(times["not limited"])[REPEATS // 2]
    for row, name in enumerate(limited):
        expected = 8 * size / RATES[name]
        parts = {
            "gradients": 1.0,
            "packet headers": HEADERS,
            "step without a limit": unlimited / expected,
        }
        left = 0.0
        for index, (part, width) in enumerate(parts.items()):
            label = part if row == 0 else None
            axes.barh(row, width, left=left, color=show.COLORS[index], height=0.6, label=label)
            left += width
        measured = [seconds / expected for seconds in times[name]]
        label = "measured steps" if row == 0 else None
        axes.plot(measured, [row] * REPEATS, "o", color=show.COLORS[3], alpha=0.7, label=label)
    axes.set_yticks(range(len(limited)), [name.replace("mbit", " Mbit/s") for name in limited])
    axes.invert_yaxis()
    axes.set_xlim(0.9, None)
    axes.set_xlabel("seconds per step, divided by 8 · bytes / rate")
    axes.legend(frameon=False, ncols=4, fontsize=8, loc="lower center", bbox_to_anchor=(0.45, 1))
    axes.spines[["top", "right"]].set_visible(False)
    show.save(figure, file)


if __name__ == "__main__":
    with one_line_errors():
        main(Parser(__doc__, plot=True).parse_args().plot)
