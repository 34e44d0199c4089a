"""Start a command the way a user types it, on the CPU, and wait for its end."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil

REPOSITORY = Path(__file__).resolve().parent.parent.parent
QUIET = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "-1",  # the same on a machine with GPUs as on one without
    "HF_HOME": os.devnull,  # so that `accelerate launch` finds no default config of the user
}
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")


def run_to_end(command: str, time_limit: float = 120) -> SimpleNamespace:
    """Run a command line from the repository's root: its returncode, stdout and stderr.

    `time_limit` is in seconds. Where it is over, every process the command started is stopped and
    returncode is None. `python`, `accelerate` and `torchrun` are those of this environment.
    """
    environment = {**os.environ, **QUIET}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    for name in LAUNCHER_VARIABLES:
        environment.pop(name, None)
    process = psutil.Popen(
        shlex.split(command),
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=time_limit)
        returncode = process.returncode
    except subprocess.TimeoutExpired:
        for started in [*process.children(recursive=True), process]:
            started.kill()
        stdout, stderr = process.communicate()
        returncode = None
    return SimpleNamespace(returncode=returncode, stdout=stdout, stderr=stderr)
