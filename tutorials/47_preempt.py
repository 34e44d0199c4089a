"""Stop training jobs at random steps, let them resume, and compare them with an undisturbed one.

Some are preempted. Others get the signal that Slurm sends before the time limit.

In a written course, with a cluster from local_slurm.py:

eval "$(python tutorials/cluster/slurm/local_slurm.py up)"
python tutorials/47_preempt.py   # takes minutes: a requeued job waits for two of them
"""

import hashlib
import random
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from accel_demo.errors import UserError, one_line_errors
from accel_demo.options import Parser
from accel_demo.show import table

SCRIPTS = Path("tutorials/cluster/slurm")
SIZES = "--train-samples 4096 --test-samples 200 --epochs 3 --print-every 1".split()
STEPS = 24  # of all epochs together
TIME_LIMIT = 900  # seconds to wait for one event
PREEMPT = ["sbatch", "--partition=urgent", "--nodes=2", "--output=/dev/null", "--wrap=sleep 5"]
WARN = ["scancel", "--signal=USR1", "--batch"]  # as Slurm does before the time limit
HEAD = ["reason", "stopped after step", "resumed after", "in the queue", "processes", "weights"]


def main(times: int) -> None:
    whole = submit("nodes.sbatch", "runs/whole")
    wait(lambda: state(whole, "JobState") == "COMPLETED", "to end")
    rows = []
    for number in range(1, times + 1):
        rows.append(["preemption", *stop(f"preempted-{number}", lambda _: PREEMPT)])
        rows.append(["time limit", *stop(f"warned-{number}", lambda job: [*WARN, job])])
    print(table(HEAD, rows))


def stop(run: str, command: Callable[[str], list[str]]) -> list[str]:
    """Stop a job with a command that depends on its number, and return a row of the table."""
    job = submit("requeue.sbatch", f"runs/{run}")
    step = random.randint(1, STEPS // 2)
    wait(lambda: f"step {step}:" in printed(job), "to train")
    slurm(*command(job))
    wait(lambda: state(job, "Restarts") == "1", "to be requeued")
    seconds = wait(lambda: state(job, "JobState") == "RUNNING", "to start again")
    wait(lambda: state(job, "JobState") == "COMPLETED", "to end")
    stopped = " and ".join(re.findall(r"stopped after step (\d+)", printed(job)))
    resumed = " and ".join(re.findall(r"resumed from .* after step (\d+)", printed(job)))
    groups = ", then ".join(re.findall(r"(\d+) processes on \w+ \(", printed(job)))
    equal = "equal" if weights(run) == weights("whole") else "different"
    return [stopped, resumed, f"{seconds:.0f} s", groups, equal]


def submit(script: str, folder: str) -> str:
    """Submit a batch script that trains. Return the job's number."""
    flags = ["--parsable", "--output=runs/slurm-%j.txt"]
    command = ["sbatch", *flags, str(SCRIPTS / script), *SIZES, "--run-dir", folder]
    return slurm(*command).strip()


def printed(job: str) -> str:
    file = Path(f"runs/slurm-{job}.txt")
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


def state(job: str, name: str) -> str:
    """Return a value from `scontrol show job`. Raises `UserError` if the job has failed."""
    shown = slurm("scontrol", "show", "job", job)
    if "JobState=FAILED" in shown:
        raise UserError(f"job {job} failed; its output is in runs/slurm-{job}.txt")
    return re.findall(rf"\b{name}=(\S+)", shown)[0]


def weights(run: str) -> str:
    """Return a digest of all bits of the trained weights."""
    return hashlib.sha256(Path("runs", run, "model.safetensors").read_bytes()).hexdigest()


def slurm(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise UserError(f"{command[0]} failed: {result.stderr.strip()}")
    return result.stdout


def wait(is_done: Callable[[], bool], what: str) -> float:
    """Wait until a condition holds. Return the number of seconds."""
    start = time.monotonic()
    while not is_done():
        if time.monotonic() - start > TIME_LIMIT:
            raise UserError(f"waited {TIME_LIMIT} s for a job {what}; see squeue")
        time.sleep(0.2)
    return time.monotonic() - start


if __name__ == "__main__":
    with one_line_errors():
        parser = Parser(__doc__)
        help = "number of jobs that are stopped for each reason (%(default)s)"
        parser.add_argument("--times", type=int, default=1, metavar="N", help=help)
        options = parser.parse_args()
        if not Path("train.py").exists():
            raise UserError("there is no train.py here. Write a course with `accel-demo init`.")
        if Path("runs/whole").exists():
            raise UserError("runs/ has results of an earlier start; use a new folder")
        Path("runs").mkdir(exist_ok=True)
        main(options.times)
