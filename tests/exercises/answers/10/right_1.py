"""Exercise 10: stop a program that has the wrong number of connected processes."""

import os

import torch
from accelerate import Accelerator


def assert_distributed(n: int) -> None:
    """Raise a RuntimeError unless exactly `n` processes were started and answer each other."""
    accelerator = Accelerator()
    present = torch.ones(1, dtype=torch.int64, device=accelerator.device)
    connected = accelerator.gather(present).numel()
    started = int(os.environ.get("WORLD_SIZE", connected))
    if not connected == started == n:
        raise RuntimeError(f"{n} connected processes are needed, but there are {connected}")
