"""Launch train.py on two connected processes many times, and count the exit codes.

python tests/processes/launch_many.py 500              # quick: import torch once, then fork
python tests/processes/launch_many.py 50 --launcher    # with `accelerate launch`: at least 6 s each

A process can abort (SIGABRT) if threads of its process group still run when the interpreter exits.
This happens once in hundreds of launches, and more often if the cores are busy. Several launches
therefore run at the same time, along with processes that only keep the cores busy. The training
runs are tiny. In quick mode, too, each process shuts its interpreter down completely.

This script exits with code 1 if a process failed or if a launch did not connect two processes.
PYTHONPATH selects the copy of accel_demo to test.
"""

import importlib
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import accel_demo
from accel_demo.errors import one_line_errors
from accel_demo.options import Parser
from accel_demo.processes.environment import QUIET, environment_for
from accel_demo.processes.launch import REPOSITORY

PROCESSES = 2
FLAGS = "--model tiny_cnn --dataset synthetic --train-samples 64 --test-samples 20 --batch-size 4"
FLAGS = [*FLAGS.split(), "--max-steps", "3", "--log-every", "1"]
TRAIN = Path(accel_demo.__file__).parent / "train.py"
CONFIG = REPOSITORY / "accelerate_configs" / "cpu_two_processes.yaml"
PRELOADED = ["accel_demo.train", "sympy", "triton", "torch._numpy"]
PRELOADED += ["torch.distributed.tensor", "torch.onnx"]
BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
TIME_LIMIT = 300  # seconds per launch


def main() -> None:
    """Launch and report. Avoid `with` and `finally` around `run_all`: forked ranks exit in it."""
    with one_line_errors():
        options = read()
    if options.one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ.update(environment_for(QUIET))  # before torch is imported
    folder = Path(tempfile.mkdtemp())
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(options.busy)]
    begin = time.monotonic()
    launches = run_all(options, folder)
    for process in busy:
        process.kill()
    shutil.rmtree(folder)
    sys.exit(report(options, launches, time.monotonic() - begin))


def read():
    parser = Parser(__doc__)
    parser.add_argument("launches", type=int, help="the number of launches")
    parser.add_argument("--launcher", action="store_true", help="use `accelerate launch`")
    parser.add_option("--at-once", 3, "number of parallel launches")
    parser.add_option("--busy", 2, "number of processes that keep a core busy")
    parser.add_argument("--one-core", action="store_true", help="run everything on one core")
    return parser.parse_args()


def run_all(options, folder: Path) -> list[dict]:
    """Run all launches. Return the exit codes, output and number of connected processes of each."""
    start = start_launcher if options.launcher else fork_ranks
    if not options.launcher:
        preload()
    running, launches = {}, []  # running: process id → (number of the launch, deadline)
    for number in range(options.launches):
        while len({launch for launch, _ in running.values()}) >= options.at_once:
            wait_for_a_process(running, launches)
        launches.append({"codes": [], "folder": folder / str(number)})
        launches[number]["folder"].mkdir()
        for pid in start(launches[number]["folder"]):
            running[pid] = number, time.monotonic() + TIME_LIMIT
        if number % 20 == 19:
            aborts = sum(map(has_aborted, launches))
            print(f"{number + 1} launches started, {aborts} aborts so far", file=sys.stderr)
    while running:
        wait_for_a_process(running, launches)
    return launches


def wait_for_a_process(running: dict, launches: list[dict]) -> None:
    """Reap one exited process, if any. If it was the last of its launch, read the results."""
    pid, status = os.waitpid(-1, os.WNOHANG)
    if pid == 0:
        for pid, (_, limit) in running.items():
            if time.monotonic() > limit:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
        return
    number, _ = running.pop(pid)
    launch = launches[number]
    launch["codes"].append(os.waitstatus_to_exitcode(status))
    if number not in {other for other, _ in running.values()}:
        folder = launch["folder"]
        launch["printed"] = "".join(path.read_text() for path in sorted(folder.glob("*.txt")))
        launch["connected"] = connected_processes(folder / "run" / "environment.json")
        shutil.rmtree(folder)


def connected_processes(file: Path) -> int:
    environment = json.loads(file.read_text()) if file.exists() else {"processes": 0, "backend": ""}
    return environment["processes"] if environment["backend"].endswith("gloo") else 0


def start_launcher(folder: Path) -> list[int]:
    accelerate = Path(sys.executable).parent / "accelerate"
    command = [accelerate, "launch", "--config_file", CONFIG, "--main_process_port", "0"]
    command = [*map(str, [*command, TRAIN, *FLAGS, "--run-dir", folder / "run"])]
    pid = fork(folder / "launcher.txt")
    if pid == 0:
        os.execv(command[0], command)
    return [pid]


def fork(output: Path) -> int:
    """Fork like `os.fork`, and redirect the child's stdout and stderr to a file."""
    pid = os.fork()
    if pid == 0:
        file = os.open(output, os.O_CREAT | os.O_WRONLY)
        os.dup2(file, sys.stdout.fileno())
        os.dup2(file, sys.stderr.fileno())
    return pid


def preload() -> None:
    """Import slow modules. This must not start a thread, because a fork would not copy it.

    Do not import torch._dynamo here. Under a launcher it is imported after the process group has
    been created, and so keeps the group alive, which must happen in a forked rank as well.
    """
    for name in PRELOADED:
        with suppress(ImportError):
            importlib.import_module(name)
    assert "torch._dynamo" not in sys.modules
    assert len(os.listdir("/proc/self/task")) == 1


def fork_ranks(folder: Path) -> list[int]:
    from accel_demo.processes.environment import rank_environment
    from accel_demo.processes.launch import free_port

    port, ranks = free_port(), []
    for rank in range(PROCESSES):
        ranks.append(fork(folder / f"rank-{rank}.txt"))
        if ranks[rank] == 0:
            os.environ.update(rank_environment(rank, PROCESSES, port))
            sys.argv = [str(TRAIN), *FLAGS, "--run-dir", str(folder / "run")]
            runpy.run_path(str(TRAIN), run_name="__main__")
            sys.exit()
    return ranks


def report(options, launches: list[dict], seconds: float) -> int:
    """Print the output of failed launches, and all counts. Return the script's exit code."""
    failed = [
        launch for launch in launches if any(launch["codes"]) or launch["connected"] != PROCESSES
    ]
    for launch in failed:
        codes = ", ".join(map(str, launch["codes"]))
        print(f"--- exit codes {codes}; {launch['connected']} connected\n{launch['printed']}")
    mode = "accelerate launch" if options.launcher else "forked (quick mode)"
    cores = len(os.sched_getaffinity(0))
    codes = Counter(code for launch in launches for code in launch["codes"])
    print(f"accel_demo: {TRAIN.parent}")
    print(f"mode: {mode}, {options.at_once} at a time, {options.busy} busy processes", end="")
    print(f", {cores} core{'s' if cores > 1 else ''}, {seconds:.0f} s")
    print(f"exit codes: {', '.join(f'{count} × {code}' for code, count in codes.most_common())}")
    aborts = sum(map(has_aborted, launches))
    connected = Counter(launch["connected"] for launch in launches)
    print(f"connected processes: {', '.join(f'{n} × {size}' for size, n in connected.items())}")
    print(f"{len(launches)} launches of {PROCESSES} connected processes: {aborts} aborts")
    return 1 if failed else 0


def has_aborted(launch: dict) -> bool:
    """Return True if a process of the launch aborted. A launcher shows it only in its output."""
    return -signal.SIGABRT in launch["codes"] or "SIGABRT" in launch.get("printed", "")


if __name__ == "__main__":
    main()
