"""Compare the time of a step with each method, between two machines and with two cables.

python tutorials/46_rates.py    # needs root and Linux; takes minutes
"""

import json
import re
import statistics
from pathlib import Path

from accel_demo.errors import UserError, one_line_errors
from accel_demo.lab import load, machine
from accel_demo.lab.measurements import interval_text, median_interval
from accel_demo.lab.output import warn
from accel_demo.options import Parser
from accel_demo.processes.launch import run_to_end
from accel_demo.show import table

RATE = 25  # Mbit/s


def main() -> None:
    load.begin()
    sent, slow = measure(f" --rate {RATE}mbit")
    _, fast = measure("")
    rows, errors = [], {}
    for method in slow:
        without, limited = (1000 * statistics.median(each[method]) for each in (fast, slow))
        predicted = without + 8 * sent[method] / (RATE * 1e3)
        errors[method] = abs(predicted / limited - 1)
        row = [method, f"{without:.1f}", faster(fast, method), f"{predicted:.1f}"]
        rows.append([*row, f"{limited:.1f}", faster(slow, method)])
    print("Milliseconds per step, and how many times faster than DDP (90 % interval)\n")
    head = ["method", "no limit", "faster", f"predicted at {RATE} Mbit/s", "measured", "faster"]
    print(table(head, rows))
    rounds = len(fast["DDP"])
    print(f"\n{rounds} rounds. {conclusion(fast, 'Without a limit')}")
    print(f"\n{conclusion(slow, f'At {RATE} Mbit/s')}")
    worst = max(errors, key=errors.__getitem__)
    off, most = (f"{100 * errors[each]:.0f} % ({each})" for each in ("DDP", worst))
    print(f"\nThe prediction is off by {off}, and at most by {most}.")
    print(f"\n{machine.sentence()}")
    warn("slower")


def measure(limit: str) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return the bytes per step, and the seconds per step of each round, by method."""
    command = f"accel-demo nodes --processes-per-node 1{limit} -- torchrun tutorials/46_step.py"
    ended = run_to_end(command, 900, cwd=Path(__file__).parent.parent)
    lines = re.findall(r"^node 0 \| (\{.*\})$", ended.stdout, re.MULTILINE)
    if ended.returncode != 0 or not lines:
        raise UserError(f"`{command}` failed: {(ended.stderr.strip().splitlines() or ['?'])[-1]}")
    result = json.loads(lines[-1])
    if result["processes"] != 2:
        raise UserError(f"`{command}` connected {result['processes']} processes instead of 2")
    return result["bytes"], result["seconds"]


def faster(seconds: dict[str, list[float]], method: str) -> str:
    if method == "DDP":
        return "–"
    ratios = ratios_to_ddp(seconds, method)
    return f"{statistics.median(ratios):.2f} ({interval_text(median_interval(ratios))})"


def ratios_to_ddp(seconds: dict[str, list[float]], method: str) -> list[float]:
    """Return how many times faster than DDP each round is."""
    pairs = zip(seconds["DDP"], seconds[method], strict=True)
    return [ddp / own for ddp, own in pairs]


def conclusion(seconds: dict[str, list[float]], when: str) -> str:
    """Return sentences with the methods whose intervals are above 1, and below 1."""
    intervals = {
        method: median_interval(ratios_to_ddp(seconds, method))
        for method in seconds
        if method != "DDP"
    }
    faster = [method for method, (low, _) in intervals.items() if low > 1]
    slower = [method for method, (_, high) in intervals.items() if high < 1]
    listed = [
        "all" if len(methods) == len(intervals) else "; ".join(methods) or "none"
        for methods in (faster, slower)
    ]
    return f"{when}, faster than DDP: {listed[0]}. Slower: {listed[1]}."


if __name__ == "__main__":
    with one_line_errors():
        Parser(__doc__).parse_args()
        main()
