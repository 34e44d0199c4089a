"""Measure the time of a DDP step between two machines at several rates of the cable between them.

python tutorials/44_rates.py    # needs root and Linux; takes minutes
"""

import math
import random
import re
from pathlib import Path

from tqdm import tqdm

from accel_demo import show
from accel_demo.errors import Parser, UserError, one_line_errors
from accel_demo.lab.measurements import interval_text, median_interval
from accel_demo.processes.launch import run_to_end

RATES = {"10mbit": 10e6, "50mbit": 50e6, "100mbit": 100e6, "not limited": math.inf}  # bits/s
REPEATS = 5
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
    print(show.table(["rate", "bytes / rate", "median step", "90 % interval", "ratio"], rows))
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
    """Draw the measured times over the rates, with bytes / rate as a line."""
    figure = show.new_figure(7, 3.6)
    axes = figure.subplots()
    limited = {name: rate / 1e6 for name, rate in RATES.items() if rate != math.inf}
    ends = [min(limited.values()) / 1.5, max(limited.values()) * 1.5]
    axes.plot(
        ends, [8e-6 * size / rate for rate in ends], color=show.COLOURS[0], label="bytes / rate"
    )
    for name, rate in limited.items():
        label = "measured steps" if name == "10mbit" else None
        axes.plot([rate] * REPEATS, times[name], "o", color=show.COLOURS[3], alpha=0.5, label=label)
    fastest = sorted(times["not limited"])[REPEATS // 2]
    axes.axhline(fastest, color="#707070", linestyle=":", label="measured without a limit")
    axes.set(xscale="log", yscale="log", xlabel="rate (Mbit/s)", ylabel="seconds per step")
    axes.set_xticks(list(limited.values()), [f"{rate:g}" for rate in limited.values()])
    axes.set_yticks([0.02, 0.1, 0.5, 2], ["0.02", "0.1", "0.5", "2"])
    axes.minorticks_off()
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    show.save(figure, file)


if __name__ == "__main__":
    with one_line_errors():
        parser = Parser(__doc__)
        parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the times in FILE")
        options = parser.parse_args()
        show.check_outputs(options)
        main(options.plot)
