"""Stop a program that has the wrong number of connected processes."""

import os

import torch.distributed as dist
from accelerate import Accelerator


def assert_distributed(n: int) -> None:
    connected = Accelerator().num_processes
    if connected != n:
        raise RuntimeError(f"{connected} processes are connected, but {n} are expected")
    if connected == 1 and (dist.is_initialized() or "LOCAL_RANK" in os.environ):
        raise RuntimeError("a launcher has started this process, but Accelerate has no group")
