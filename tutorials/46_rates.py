"""Compare the time of a step with each method, between two machines and with two cables.

python tutorials/46_rates.py    # needs root and Linux; takes minutes
"""

import json
import re
import statistics
from pathlib import Path

from accel_demo.errors import UserError, one_line_errors
from accel_demo.lab import machine
from accel_demo.lab.measurements import interval_text, median_interval
from accel_demo.options import Parser
from accel_demo.processes.launch import run_to_end
from accel_demo.show import table

RATE = 25  # Mbit/s


def main() -> None:
    sent, slow = measure(f" --rate {RATE}mbit")
    _, fast = measure("")
    rows = []
    for method in slow:
        wire = 8 * sent[method] / (RATE * 1e6)
        predicted = statistics.median(fast[method]) + wire
        row = [method, f"{1000 * wire:.0f}", f"{1000 * predicted:.0f}"]
        for seconds in (slow, fast):
            row.append(f"{1000 * statistics.median(seconds[method]):.0f}")
            pairs = zip(seconds["DDP"], seconds[method], strict=True)
            ratios = [ddp / own for ddp, own in pairs]
            interval = interval_text(median_interval(ratios), digits=1)
            is_ddp = method == "DDP"
            row.append("–" if is_ddp else f"{statistics.median(ratios):.1f} ({interval})")
        rows.append(row)
    print("Milliseconds per step, and how many times faster than DDP (90 % interval)\n")
    head = ["method", f"8 · bytes / rate at {RATE} Mbit/s", "predicted", "measured", "faster"]
    print(table([*head, "not limited", "faster"], rows))
    print(f"\n{machine.sentence()}")


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


if __name__ == "__main__":
    with one_line_errors():
        Parser(__doc__).parse_args()
        main()
