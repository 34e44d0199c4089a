"""What the launcher promised: how many processes, and a device for each of them."""

import os
import platform
from importlib import metadata

import torch

from accel_demo.config import TrainConfig
from accel_demo.errors import UserError

# torchrun, Open MPI, MPICH, MVAPICH: where each launcher writes how many processes it started.
WORLD_SIZE_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def use_cpu() -> bool:
    """True unless each process on this machine can have an accelerator (GPU) of its own.

    `Accelerator(cpu=use_cpu())` is what connects several processes on a machine without a GPU: a
    plain `Accelerator()` leaves each of them alone there, rank 0 of 1.
    """
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return torch.accelerator.device_count() < local_processes


def check_processes(world_size: int, device: torch.device, mixed_precision: str) -> None:
    """Raise `UserError` where the run is not what its launcher promised.

    `world_size` is the number of connected processes, `mixed_precision` is "no", "bf16" or "fp16".
    """
    promised = max(int(os.environ.get(name, 1)) for name in WORLD_SIZE_VARIABLES)
    if world_size != promised:
        raise UserError(
            f"the launcher started {promised} processes, but this one is connected to "
            f"{world_size - 1} others; `accel-demo doctor --config FILE` shows what a config starts"
        )
    if mixed_precision == "fp16" and device.type == "cpu":
        raise UserError(
            "fp16 needs a GPU: on a CPU Accelerate would train in fp32 without a word; "
            "set mixed_precision to bf16 or no"
        )


def opening_line(config: TrainConfig, world_size: int, device: torch.device, backend: str) -> str:
    """What is about to happen, in one line: who trains, on what, and how large a step is."""
    processes = f"{world_size} process{'es' if world_size > 1 else ''}"
    images = world_size * config.batch_size * config.accumulate
    return (
        f"{processes} on {device.type} ({backend}): {config.model} on {config.dataset}, "
        f"{world_size} x {config.batch_size} images x {config.accumulate} = {images} per step"
    )


def describe_run(
    telling: str, world_size: int, backend: str, device: torch.device, mixed_precision: str
) -> dict:
    """What a run is about to run on, for its environment.json."""
    packages = ("torch", "torchvision", "accelerate")
    return {
        "telling": telling,
        "processes": world_size,
        "backend": backend,
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        "mixed_precision": mixed_precision,
        "threads_per_process": torch.get_num_threads(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: metadata.version(name) for name in packages},
    }
