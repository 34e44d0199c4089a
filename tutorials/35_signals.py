"""Send signals to a launcher or to one of its processes, and show what becomes of the run.

python tutorials/35_signals.py  # on Linux or macOS
"""

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import psutil
from tqdm import tqdm

from accel_demo.errors import one_line_errors
from accel_demo.options import Parser
from accel_demo.processes.cleanup import adopt_orphans, kill_descendants
from accel_demo.processes.environment import QUIET, environment_for
from accel_demo.show import table

COURSE = Path(__file__).parent.parent
SCRIPT = "accel_demo/train_ddp.py"
FLAGS = "--model tiny_cnn --dataset synthetic --train-samples 4800 --test-samples 16 --batch-size 4"
FLAGS += " --epochs 1 --checkpoint-every 20 --log-every 1 --resume auto --run-dir"
STEP = 30  # the signal is sent after this step
CASES = [  # options of torchrun, who gets the signal, and which one
    ("", "launcher", signal.SIGTERM),
    ("", "launcher", signal.SIGUSR1),
    ("--signals-to-handle SIGTERM,SIGINT,SIGUSR1", "launcher", signal.SIGUSR1),
    ("", "rank 1", signal.SIGUSR1),
    ("", "rank 1", signal.SIGKILL),
    ("--max-restarts 1", "rank 1", signal.SIGKILL),
]
SAYS = {  # what the run prints
    "stopped after step": "saves, and stops",
    "resumed from": "starts again, and resumes",
}
TIME_LIMIT = 120


def main() -> None:
    adopt_orphans()
    rows = []
    for options, target, number in tqdm(CASES, desc="signals", unit="launch", disable=None):
        with tempfile.TemporaryDirectory() as folder:
            said, code = run(options, target, number, Path(folder))
        command = " ".join(["torchrun", *options.split(), "…"])
        rows.append([f"`{command}`", target, number.name, said, code])
    print(table(["command", "who gets the signal", "signal", "the run", "exit code"], rows))


def run(options: str, target: str, number: signal.Signals, folder: Path) -> tuple[str, int]:
    """Send a signal after `STEP`. Return what the run says about it, and the launcher's code."""
    words = f"torchrun --standalone --nproc-per-node 2 {options} {SCRIPT} {FLAGS} {folder}/run"
    with open(folder / "log", "w") as log:
        launcher = psutil.Popen(
            words.split(), env=environment_for(QUIET), cwd=COURSE, stdout=log, stderr=log
        )
    try:
        wait_for_step(folder / "run" / "metrics.jsonl", launcher)
        ranks = sorted(launcher.children(), key=psutil.Process.create_time)
        os.kill(launcher.pid if target == "launcher" else ranks[1].pid, number)
        code = launcher.wait(TIME_LIMIT)
    except (psutil.TimeoutExpired, subprocess.TimeoutExpired):
        raise TimeoutError(f"{target} got {number.name}: the run goes on") from None
    finally:
        kill_descendants()  # also the processes of a launcher that has died
    log = (folder / "log").read_text()
    said = sorted(filter(log.__contains__, SAYS), key=log.rindex)
    return SAYS[said[-1]] if said else "dies", code


def wait_for_step(metrics: Path, launcher: psutil.Popen) -> None:
    deadline = time.monotonic() + TIME_LIMIT
    while not metrics.exists() or len(metrics.read_text().splitlines()) < STEP:
        if launcher.poll() is not None or time.monotonic() > deadline:
            raise TimeoutError(f"the run has not reached step {STEP}")
        time.sleep(0.02)


if __name__ == "__main__":
    with one_line_errors():
        Parser(__doc__).parse_args()
        main()
