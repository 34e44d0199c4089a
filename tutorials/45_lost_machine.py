"""Lose one of two nodes during training, and compare the final weights with another run's.

python tutorials/44_lost_machine.py    # needs root and Linux; takes minutes
"""

import hashlib
import json
import re
import tempfile
import time
from pathlib import Path

from accel_demo.errors import Parser, UserError, one_line_errors
from accel_demo.processes.launch import run_to_end
from accel_demo.show import table

TRAIN = "torchrun accel_demo/train.py --epochs 3 --checkpoint-every 5 --collective-timeout 10"
SHARE = 0.7  # of the time of an undisturbed launch; then, node 1 is lost
CASES = {  # what happens, and the options of each `accel-demo nodes`
    "nothing": [""],
    "node 1 loses its cable": ["--cut-after {}", ""],
    "node 1 dies and comes back": ["--elastic --kill-after {} --restart-after 3"],
    "node 1 dies": ["--elastic --kill-after {}"],
    "an elastic launch loses node 1's cable": ["--elastic --cut-after {}"],
}


def main() -> None:
    digests, rows, errors, moment = {}, [], [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        for number, (case, launches) in enumerate(CASES.items()):
            run = Path(folder, str(number))
            printed, codes, started = "", [], time.monotonic()
            for options in launches:
                command = f"accel-demo nodes {options.format(moment)} -- {TRAIN} --run-dir {run}"
                ended = run_to_end(f"{command} --resume auto", 300)
                printed += ended.stdout + ended.stderr
                codes.append(str(ended.returncode))
                if ended.returncode != 0:
                    errors += re.findall(r"^node \d \| error: .*", printed, re.MULTILINE)
            if not (run / "model.safetensors").exists():
                raise UserError(f"{case}: the run has not finished ({last(printed)})")
            digests[case] = hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()
            moment = moment or SHARE * (time.monotonic() - started)
            is_equal = digests[case] == digests["nothing"]
            steps = re.findall(r"resumed from \S+, after step (\d+)", printed)
            processes = json.loads((run / "environment.json").read_text())["processes"]
            cells = [", ".join(steps) or "–", processes, "equal" if is_equal else "differ"]
            rows.append([case, ", then ".join(codes), *cells])
    head = ["what happens", "exit code", "resumed after step", "processes at the end", "weights"]
    print("Errors of launches that failed:\n" + "\n".join(errors) + "\n\n" + table(head, rows))


def last(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


if __name__ == "__main__":
    with one_line_errors():
        Parser(__doc__).parse_args()
        main()
