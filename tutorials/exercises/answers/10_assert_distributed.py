"""A model answer to exercise 10."""

import os

from accelerate import PartialState


def assert_distributed(n: int) -> None:
    connected = PartialState().num_processes  # the script's Accelerator shares this state
    started = int(os.environ.get("WORLD_SIZE", "1"))  # with srun or mpirun: see launch_checks.py
    if connected != n or connected < started:
        raise RuntimeError(f"expected {n} processes: {started} started, {connected} connected")
