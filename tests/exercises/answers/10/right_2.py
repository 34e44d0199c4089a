"""Stop a program that has the wrong number of connected processes."""

import torch
from accelerate import Accelerator


def assert_distributed(n: int) -> None:
    accelerator = Accelerator()
    one = torch.ones(1, device=accelerator.device)
    connected = len(accelerator.gather(one))
    if connected != n:
        raise RuntimeError(f"{connected} processes are connected, but {n} are expected")
