"""Checks that a launch does what its launcher and its config promise."""

import os

import torch

from accel_demo.errors import UserError
from accel_demo.processes.environment import number_in
from accel_demo.processes.fsdp import uses_fsdp

KIND_VARIABLES = {  # `accelerate launch` sets one of them to "true"
    "FSDP": "ACCELERATE_USE_FSDP",
    "DeepSpeed": "ACCELERATE_USE_DEEPSPEED",
    "Megatron-LM": "ACCELERATE_USE_MEGATRON_LM",
}
# The variables in which torchrun, Open MPI, MPICH and MVAPICH store the number of processes.
WORLD_SIZE_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def check_launch(world_size: int, device: torch.device, mixed_precision: str) -> None:
    """Raise `UserError` if the processes do not train as the launcher promises.

    Either some processes are not connected, the model is not distributed as the launch config says,
    or fp16 is set on a CPU. `world_size` is the number of connected processes. `mixed_precision` is
    "no", "bf16" or "fp16".
    """
    check_kind(device)
    if kind_of_launch() and not uses_fsdp():
        raise UserError(
            f"{kind_of_launch()} has no effect on this program, which does not use Accelerate. "
            "Launch a program that does, or choose a different launch config."
        )
    promised = started_processes()
    if world_size != promised:
        raise UserError(
            f"the launcher started {promised} processes, but only {world_size} "
            f"{'is' if world_size == 1 else 'are'} connected. "
            "Check your config with `accel-demo doctor --config FILE`."
        )
    if mixed_precision == "fp16" and device.type == "cpu":
        raise UserError(
            "fp16 needs a GPU: on a CPU Accelerate would silently train in fp32. "
            "Set mixed_precision to bf16 or no."
        )


def started_processes() -> int:
    """Return how many processes the launcher has started, or 1 if there is no launcher.

    Slurm's `srun` counts only if it has started the script itself. Its tasks may also be launchers
    on several nodes, or be idle next to a shell (`srun --pty`).
    """
    names: list[str] = list(WORLD_SIZE_VARIABLES)
    if "WORLD_SIZE" not in os.environ and "SLURM_PTY_PORT" not in os.environ:
        names.append("SLURM_STEP_NUM_TASKS")
    return max(number_in(name, 1) for name in names)


def check_kind(device: torch.device) -> None:
    """Raise `UserError` if the launch asks for a kind of distribution that we cannot provide.

    On a CPU, Accelerate silently replaces each of them with DDP, so that every process would hold
    the whole model.
    """
    kind = kind_of_launch()
    if kind and device.type == "cpu":
        raise UserError(
            f"{kind} needs a GPU for each process: without them, Accelerate would silently train "
            "with DDP. Use accelerate_configs/cpu_two_processes.yaml."
        )
    if kind not in ("", "FSDP2"):
        raise UserError(
            f"{kind} does not work with this project, which uses DDP and FSDP2. Use "
            "accelerate_configs/multi_gpu.yaml or fsdp2.yaml."
        )


def kind_of_launch() -> str:
    """Return the kind of distribution that `accelerate launch` was told to use, such as "FSDP2".

    Return "" if it is DDP or none, or if there is no launcher: then no variable is set.
    """
    for name, variable in KIND_VARIABLES.items():
        if os.environ.get(variable, "false").lower() == "true":
            return f"FSDP{os.environ.get('FSDP_VERSION', '1')}" if name == "FSDP" else name
    return ""
