"""Describe this machine: CPU, memory, GPUs, package versions and environment variables."""

import os
import platform
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import psutil

from accel_demo.anatomy.devices import usable_cores
from accel_demo.wording import byte_size

# Environment variables that the launchers, torch and Accelerate read.
LAUNCH_VARIABLES = (
    "OMP_NUM_THREADS MKL_NUM_THREADS CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER RANK LOCAL_RANK "
    "WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME "
    "OMPI_COMM_WORLD_SIZE PMI_SIZE MV2_COMM_WORLD_SIZE SLURM_STEP_NUM_TASKS"
).split()
LAUNCH_PREFIXES = ("ACCELERATE_", "NCCL_", "TORCH_NCCL_", "FSDP_", "PYTORCH_")


def version_rows() -> list[tuple[str, str]]:
    """Return (name, version) pairs for Python, torch, torchvision, Accelerate and torch's CUDA."""
    import torch

    packages = [(name, metadata.version(name)) for name in ("torch", "torchvision", "accelerate")]
    cuda = torch.version.cuda or torch.version.hip or "CPU only"
    return [("python", platform.python_version()), *packages, ("torch built for CUDA", cuda)]


def environment_rows() -> list[tuple[str, str]]:
    """Return (name, value) pairs for the environment variables that affect a launch."""
    names = sorted(name for name in os.environ if name.startswith(LAUNCH_PREFIXES))
    names = [name for name in LAUNCH_VARIABLES if name in os.environ] + names
    return [(name, os.environ[name]) for name in names] or [("none set", "")]


def environment() -> dict:
    """Describe the hardware, the operating system, package versions and environment variables."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        gpus.append("Apple's GPU (MPS)")
    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "bf16_instructions": has_bf16_instructions(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "memory": byte_size(psutil.virtual_memory().total),
        "gpu": ", ".join(gpus),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "variables": dict(environment_rows()),
        **dict(version_rows()),
    }


def sentence() -> str:
    """Return a line that describes the machine and the versions of a measurement."""
    here = environment()
    return (
        f"Measured on {here['cpu']}, {here['cores']} cores, {here['gpu'] or 'no GPU'}, "
        f"torch {here['torch']}, accelerate {here['accelerate']}."
    )


def cpu_name() -> str:
    """Return the model of the CPU, or the architecture if the model is unknown."""
    return _cpu_line("model name") or platform.processor() or platform.machine()


def has_bf16_instructions() -> bool:
    """Return whether the CPU has bfloat16 instructions. Without them, bf16 is slow in torch.

    With them, bf16 may still be slower than float32: on one Intel CPU with `avx512_bf16`,
    it multiplied matrices at about half the speed of float32.
    """
    words = f"{_cpu_line('flags')} {_cpu_line('Features')}".split()  # the keys on x86 and on ARM
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(words)


def _cpu_line(key: str) -> str:
    """Return the first value of `key` in /proc/cpuinfo, or "" if the key or file does not exist."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return ""
