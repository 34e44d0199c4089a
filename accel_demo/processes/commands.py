"""Start a command the way a user types it, on the CPU, and wait for its end."""

import os
import shlex
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil

from accel_demo.processes.fork_server import start_program

REPOSITORY = Path(__file__).resolve().parent.parent.parent
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
QUIET = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": LOOPBACK,
    "CUDA_VISIBLE_DEVICES": "-1",  # the same on a machine with GPUs as on one without
    "HF_HOME": os.devnull,  # so that `accelerate launch` finds no default config of the user
}
LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
)


def run_to_end(command: str, time_limit: float = 120, **environment: str) -> SimpleNamespace:
    """Run a command line from the repository's root, and return its returncode, stdout and stderr.

    After `time_limit` seconds every process the command has started is killed, and returncode is
    None. `python`, `accelerate` and `torchrun` are those of this environment; `environment` is
    added to the environment variables of the command. If a fork server is running (see
    fork_server.py), Python programs are forked from it.
    """
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        environment = environment_for({**QUIET, **environment})
        process = start_program(shlex.split(command), environment, REPOSITORY, stdout, stderr)
        try:
            returncode = process.wait(timeout=time_limit)
        except subprocess.TimeoutExpired:
            kill_tree(process)
            process.wait()
            returncode = None
        for file in (stdout, stderr):
            file.seek(0)
        return SimpleNamespace(returncode=returncode, stdout=stdout.read(), stderr=stderr.read())


def environment_for(changes: dict[str, str]) -> dict[str, str]:
    """The user's environment with these changes, for a command that is no part of this launch.

    What a launcher may have left in it is gone, and the programs of this Python come first.
    """
    environment = {**os.environ, **changes}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    for name in LAUNCHER_VARIABLES:
        environment.pop(name, None)
    return environment


def python_for_workers() -> str:
    """Return the Python to start worker processes with, chosen as torchrun chooses it."""
    return os.environ.get("PYTHON_EXEC", sys.executable)


def kill_tree(launcher: subprocess.Popen) -> None:
    """Stop the launcher and every process below it. (torchrun's workers are no group of its.)"""
    started = []
    with suppress(psutil.NoSuchProcess):
        started = psutil.Process(launcher.pid).children(recursive=True)
    launcher.kill()
    for process in started:
        with suppress(psutil.NoSuchProcess):
            process.kill()
