"""Connect the processes of a launch, choose their devices, and check their number."""

import os
import platform
from importlib import metadata
from typing import TypeVar

import torch
import torch.distributed as dist

from accel_demo.errors import UserError
from accel_demo.processes.environment import number_in
from accel_demo.processes.fsdp import uses_fsdp
from accel_demo.workarounds import fresh_rendezvous

T = TypeVar("T")
KIND_VARIABLES = {  # `accelerate launch` sets one of them to "true"
    "FSDP": "ACCELERATE_USE_FSDP",
    "DeepSpeed": "ACCELERATE_USE_DEEPSPEED",
    "Megatron-LM": "ACCELERATE_USE_MEGATRON_LM",
}
# The variables in which torchrun, Open MPI, MPICH and MVAPICH store the number of processes.
WORLD_SIZE_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def use_cpu() -> bool:
    """Return True unless each process on this machine can have its own GPU.

    Without GPUs, `Accelerator()` would not connect the processes of a launch: each process would be
    rank 0 of 1. `Accelerator(cpu=use_cpu())` connects them.
    """
    if "LOCAL_WORLD_SIZE" in os.environ and torch.backends.mps.is_available():
        return True  # no communication backend supports Apple's GPU
    return torch.accelerator.device_count() < number_in("LOCAL_WORLD_SIZE", 1)


def own_device() -> torch.device:
    """Return the device of this process: the GPU with the index LOCAL_RANK, or the CPU."""
    if use_cpu():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None  # without one, use_cpu() returns True
    return torch.device(accelerator.type, number_in("LOCAL_RANK", 0))


def connect(timeout: float) -> torch.device:
    """Connect the processes of a launch, and return the device of this process.

    Collectives time out after `timeout` seconds. Without a launcher, there is nothing to connect.
    If MPI started the processes, this function leaves it to Accelerate to connect them.

    If some processes do not connect, this function raises `UserError`, or a `RuntimeError` that
    `report_lost_processes` turns into a `UserError`.
    """
    device = own_device()
    check_kind(device)
    if dist.is_initialized() or "RANK" not in os.environ:
        return device
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    backend = dist.get_default_backend_for_device(device)
    device_id = None if device.type == "cpu" else device
    dist.init_process_group(backend, device_id=device_id, **fresh_rendezvous(timeout))
    return device


def is_main_process() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def gather_objects(value: T) -> list[T]:
    """Return the values of all processes, in rank order. Every process passes a picklable value."""
    values = [value]
    if dist.is_initialized():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


def autocast_for(device: torch.device, precision: str) -> torch.autocast:
    """Return the autocast context that Accelerate uses for the precision "no", "bf16" or "fp16"."""
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype, enabled=precision != "no")


def kind_of_launch() -> str:
    """Return the kind of distribution that `accelerate launch` was told to use, such as "FSDP2".

    Return "" if it is DDP or none, or if there is no launcher: then no variable is set.
    """
    for name, variable in KIND_VARIABLES.items():
        if os.environ.get(variable, "false").lower() == "true":
            return f"FSDP{os.environ.get('FSDP_VERSION', '1')}" if name == "FSDP" else name
    return ""


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


def check_processes(world_size: int, device: torch.device, mixed_precision: str) -> None:
    """Raise `UserError` if the processes do not train as the launcher promises.

    Either some processes are not connected, the model is not distributed as the launch config says,
    or fp16 is set on a CPU. `world_size` is the number of connected processes. `mixed_precision` is
    "no", "bf16" or "fp16".
    """
    check_kind(device)
    if kind_of_launch() and not uses_fsdp():
        raise UserError(
            f"only train.py supports {kind_of_launch()}. Launch it instead, or use "
            "accelerate_configs/multi_gpu.yaml."
        )
    promised = max(number_in(name, 1) for name in WORLD_SIZE_VARIABLES)
    if world_size != promised:
        raise UserError(
            f"the launcher started {promised} processes, but only {world_size} are connected. "
            "Check your config with `accel-demo doctor --config FILE`."
        )
    if mixed_precision == "fp16" and device.type == "cpu":
        raise UserError(
            "fp16 needs a GPU: on a CPU Accelerate would silently train in fp32. "
            "Set mixed_precision to bf16 or no."
        )


def describe_run(version: str, device: torch.device, mixed_precision: str) -> dict:
    """Return the environment of a run, as written to environment.json.

    `version` is the name of a train file without ".py". The processes must already be connected.
    """
    packages = ("torch", "torchvision", "accelerate")
    return {
        "script": version,
        "processes": dist.get_world_size() if dist.is_initialized() else 1,
        "backend": _connection_of(version),
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        "mixed_precision": mixed_precision,
        "threads_per_process": torch.get_num_threads(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: metadata.version(name) for name in packages},
    }


def _connection_of(version: str) -> str:
    """Return a description of how the processes or devices are connected."""
    if version == "train_ddp":
        return f"DistributedDataParallel, {dist.get_backend()}"
    if version == "train":
        from accelerate import PartialState

        state = PartialState()
        backend = f", {state.backend}" if state.num_processes > 1 else ""
        return f"distributed_type {state.distributed_type.value}{backend}"
    single = {"train_plain": "plain", "train_dp": "DataParallel"}
    return single.get(version) or (dist.get_backend() if dist.is_initialized() else "none")


def replica_devices(compiled: bool, precision: str) -> list[int]:
    """Return the indices of the GPUs for `nn.DataParallel`.

    Raises `UserError` if `nn.DataParallel` does not support the options.
    """
    count = torch.accelerator.device_count()
    if count < 2:
        print("fewer than two GPUs: nn.DataParallel only calls the module it wraps")
    elif compiled:
        raise UserError("--compile does not affect the replicas of nn.DataParallel. Leave it out.")
    elif precision == "bf16":
        raise UserError(
            "the threads of nn.DataParallel would compute in fp16 instead of bf16. "
            "Leave --mixed-precision out, or use train_ddp.py."
        )
    return list(range(count))
