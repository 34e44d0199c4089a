"""Environment variables that a launcher sets for its processes."""

import os
import re
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from accel_demo.errors import UserError

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
QUIET = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": LOOPBACK,
    "CUDA_VISIBLE_DEVICES": "-1",  # use the CPU even on a machine with GPUs
    "HF_HOME": os.devnull,  # hide the user's config from `accelerate launch`
}

# torchrun reads these if the flags are not on its command line.
TORCHRUN_VARIABLES = (
    "PET_NNODES",
    "PET_NODE_RANK",
    "PET_NPROC_PER_NODE",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
)


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the variables for `init_process_group`, as torchrun sets them on one machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


RANK_VARIABLES = tuple(rank_environment(0, 1, 0))


def is_launched() -> bool:
    """Return True if torchrun or a similar launcher started this process.

    Raises `UserError` if only some of the launcher's variables are set.
    """
    missing = [name for name in RANK_VARIABLES if name not in os.environ]
    if "RANK" not in os.environ:
        return False
    if missing:
        raise UserError(f"RANK is set, but not {', '.join(missing)}. Unset RANK, or use torchrun.")
    return True


def nodes_may_change() -> bool:
    """Return True if torchrun may change the number of nodes, as with `--nnodes 1:2`."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    words = [os.environ.get("PET_NNODES", "")]  # torchrun reads this if there is no --nnodes
    with suppress(psutil.Error):
        words = [*words, *psutil.Process(os.getppid()).cmdline()]
    return any(re.fullmatch(r"(--nnodes=)?\d+:\d+", word) for word in words)


def number_in(variable: str, default: int) -> int:
    """Return an environment variable as an integer. Raises `UserError` if it is not an integer."""
    value = os.environ.get(variable, default)
    try:
        return int(value)
    except ValueError:
        raise UserError(
            f"{variable} must be an integer, got {value!r}. Change it, or unset it."
        ) from None


def environment_for(changes: dict[str, str]) -> dict[str, str]:
    """Return the current environment with `changes`, for a command that is not part of this launch.

    The launcher's variables are removed. The folder of this Python interpreter is first in PATH.
    """
    environment = {**os.environ, **changes}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    for name in (*RANK_VARIABLES, *TORCHRUN_VARIABLES, "TORCHELASTIC_USE_AGENT_STORE"):
        environment.pop(name, None)
    return environment
