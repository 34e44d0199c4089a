"""Stand in for Slurm's commands in the script of exercise 47, if there is no cluster.

A job's folder, which the variable JOB_FOLDER names, contains a file for each running `srun`, with
its process ID as name, and the file `requeue` after `scontrol requeue`. See slurm_47.py.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from accel_demo.lab.nodes.launches import Plan, slurm_variables

# Options of `srun` that have no effect here, with and without a value
WITH_VALUE = "-c --cpus-per-task, --cpu-bind, -e --error, --export, --gpus, --gpus-per-node"
WITH_VALUE += ", --gpus-per-task, -i --input, -J --job-name, --mem, --mpi, --network, -o --output"
WITH_VALUE += ", -t --time, -w --nodelist, -W --wait"
WITHOUT_VALUE = "--exact, --exclusive, -K --kill-on-bad-exit, -l --label, --overlap, -q --quiet"
WITHOUT_VALUE += ", -u --unbuffered, -v --verbose"
FORWARDED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def srun(arguments: list[str]) -> int:
    """Start a command in each task, forward signals to the tasks, and wait until all have ended.

    Return the highest exit code. Source: https://slurm.schedmd.com/srun.html
    """
    options = parser_of_srun().parse_args(arguments)
    nodes = expanded(os.environ["SLURM_JOB_NODELIST"])[: options.nodes]
    of_job = int(os.environ.get("SLURM_NTASKS", len(nodes)))
    tasks = options.ntasks or len(nodes) * (options.ntasks_per_node or 0) or of_job
    nodes = nodes[:tasks]
    per_node = -(-tasks // len(nodes))
    processes: list[subprocess.Popen] = []

    def forward(number, frame):
        for process in processes:
            process.send_signal(number)

    for number in FORWARDED:
        signal.signal(number, forward)
    running = job_folder() / str(os.getpid())
    running.touch()
    for task in range(tasks):
        changes = variables_of_task(nodes, per_node, *divmod(task, per_node))
        environment = {**os.environ, **changes}
        command = options.command
        processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment))
    codes = [process.wait() for process in processes]
    running.unlink()
    return max(128 - code if code < 0 else code for code in codes)


def parser_of_srun() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("srun")
    of_job = os.environ.get
    parser.add_argument("-N", "--nodes", type=int, default=int(of_job("SLURM_NNODES", 1)))
    parser.add_argument("-n", "--ntasks", type=int)
    parser.add_argument("--ntasks-per-node", type=int)
    for names in WITH_VALUE.split(","):
        parser.add_argument(*names.split())
    for names in WITHOUT_VALUE.split(","):
        parser.add_argument(*names.split(), action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser


def variables_of_task(nodes: list[str], per_node: int, node: int, local: int) -> dict[str, str]:
    """Return the variables that differ between tasks or steps."""
    plan = Plan(len(nodes), per_node, nodes, port=0, slurm=True)
    variables = slurm_variables(plan, node, local)
    for name in ("JOB_ID", "JOBID", "JOB_NODELIST", "NODELIST", "JOB_NUM_NODES"):
        del variables[f"SLURM_{name}"]
    return variables | {"SLURM_STEP_NUM_NODES": str(len(nodes))}


def scontrol(arguments: list[str]) -> int:
    job, folder = os.environ["SLURM_JOB_ID"], job_folder()
    match arguments:
        case ["show", "hostnames" | "hostname", *nodes]:
            print("\n".join(expanded(*(nodes or [os.environ["SLURM_JOB_NODELIST"]]))))
        case ["show", "job", *numbers] if numbers in ([], [job]):
            restarts = os.environ.get("SLURM_RESTART_COUNT", 0)
            print(f"JobId={job}\n   JobState=RUNNING Reason=None\n   Requeue=1 Restarts={restarts}")
            print("   PreemptEligibleTime=2030-01-01T00:00:00 PreemptTime=None")
        case ["requeue", number] if number == job:
            (folder / "requeue").touch()
        case ["requeue", number]:
            sys.exit(f"scontrol: error: Invalid job id specified for job {number}")
        case _:
            sys.exit(f"scontrol: the check has no replacement for {' '.join(arguments)}")
    return 0


def scancel(arguments: list[str]) -> int:
    """Send a signal to the tasks of the job or, with --batch, to its script."""
    parser = argparse.ArgumentParser("scancel")
    parser.add_argument("-s", "--signal", default="TERM")
    parser.add_argument("-b", "--batch", action="store_true")
    parser.add_argument("job")
    options = parser.parse_args(arguments)
    number = signal_named(options.signal)
    if options.batch:
        os.kill(int((job_folder() / "script").read_text(encoding="utf-8")), number)
    else:
        signal_steps(job_folder(), number)
    return 0


def hostname(arguments: list[str]) -> int:
    print(os.environ["SLURMD_NODENAME"])
    return 0


def signal_steps(folder: Path, number: int) -> int:
    """Send a signal to each running `srun` of a job. Return how many there are."""
    steps = [int(file.name) for file in folder.iterdir() if file.name.isdigit()]
    for process_id in steps:
        with suppress(ProcessLookupError):
            os.kill(process_id, number)
    return len(steps)


def signal_named(name: str) -> signal.Signals:
    """Return the signal with this number or name, such as USR1 or SIGUSR1."""
    if name.isdigit():
        return signal.Signals(int(name))
    return signal.Signals[f"SIG{name.upper().removeprefix('SIG')}"]


def expanded(nodes: str) -> list[str]:
    """Return the names of nodes: `a[1-2],b` is a1, a2 and b."""
    names = []
    for prefix, ranges in re.findall(r"([^,\[\]]+)(?:\[([^\]]*)\])?", nodes):
        numbers = [part.partition("-") for part in ranges.split(",")] if ranges else []
        for first, _, last in numbers:
            numbered = range(int(first), int(last or first) + 1)
            names += [f"{prefix}{number:0{len(first)}}" for number in numbered]
        names += [] if ranges else [prefix]
    return names


def job_folder() -> Path:
    return Path(os.environ["JOB_FOLDER"])


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    each.__name__: each for each in (srun, scontrol, scancel, hostname)
}

if __name__ == "__main__":
    sys.exit(COMMANDS[sys.argv[1]](sys.argv[2:]))
