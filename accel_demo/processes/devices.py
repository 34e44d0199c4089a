"""The device of each process, and the devices of `nn.DataParallel`."""

import os

import torch

# Import this before a process group exists, as rendezvous.py explains. Programs that use only this
# module, and let Accelerate connect their processes, need it, too.
import torch.distributed.nn.functional  # noqa: F401

from accel_demo.errors import UserError
from accel_demo.processes.environment import number_in


def use_cpu() -> bool:
    """Return True unless each process on this machine can have its own GPU.

    Without GPUs, `Accelerator()` would not connect the processes of a launch: each process would be
    rank 0 of 1. `Accelerator(cpu=use_cpu())` connects them. If there are GPUs, but too few, they
    are hidden, because Accelerate's barrier would still use them: see `wait_for_everyone` there.
    """
    if "LOCAL_WORLD_SIZE" in os.environ and torch.backends.mps.is_available():
        return True  # no communication backend supports Apple's GPU
    gpus = torch.accelerator.device_count()
    too_few = gpus < number_in("LOCAL_WORLD_SIZE", 1)
    if gpus and too_few:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    return too_few


def own_device() -> torch.device:
    """Return the device of this process: the GPU with the index LOCAL_RANK, or the CPU.

    `Accelerator` chooses the same device on its own.
    """
    if use_cpu():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None  # without one, use_cpu() returns True
    return torch.device(accelerator.type, number_in("LOCAL_RANK", 0))


def replica_devices(compiled: bool, precision: str) -> list[int]:
    """Return the indices of the GPUs for `nn.DataParallel`.

    Raises `UserError` if `nn.DataParallel` does not support the options.
    """
    count = torch.accelerator.device_count()
    if count >= 2 and compiled:
        raise UserError("--compile does not affect the replicas of nn.DataParallel. Leave it out.")
    if count >= 2 and precision == "bf16":
        raise UserError(
            "the threads of nn.DataParallel would compute in fp16 instead of bf16. "
            "Leave --mixed-precision out."
        )
    return list(range(count))


def autocast_for(device: torch.device, precision: str) -> torch.autocast:
    """Return the autocast context that Accelerate uses for the precision "no", "bf16" or "fp16"."""
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype, enabled=precision != "no")
