"""Read launch configs, check them for mistakes, and predict which processes they will start."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from accel_demo.errors import UserError

OTHER_KINDS = {"DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM"}
PRECISIONS = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Promise:
    """The processes that a launch config should start."""

    processes: int
    backend: str  # "gloo" or "nccl"; "none" if there is no process group
    device: str  # such as "cpu" or "cuda"
    dtype: str  # of layer outputs: "float32", "bfloat16" or "float16"
    kind: str  # of distribution: "DDP", "FSDP2", … or "none" for one process
    machines: int = 1


@dataclass(frozen=True)
class ProbeAnswer:
    """What one launched process reports."""

    rank: int
    world_size: int
    backend: str
    device: str  # such as "cpu" or "cuda:0"
    dtype: str
    kind: str
    is_sharded: bool  # True if the process holds only a part of the parameters
    pid: int
    gathered_pids: list[int]  # the result of a collective, and so is `sum_of_ranks`
    sum_of_ranks: float  # as if ranks were numbered from 1
    is_plain: bool  # True if a plain Accelerator() would have been the same


def read_config(
    path: Path, overrides: dict | None = None, num_processes: int | None = None
) -> dict:
    """Read and check a launch config. Raises `UserError` if Accelerate could not launch it.

    If the config is for several machines, `overrides` replaces some of its values. `num_processes`
    replaces its number of processes.
    """
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = "it is a folder" if path.is_dir() else error.strerror
        raise UserError(f"cannot read launch config {str(path)[:200]}: {reason}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"{path} is not YAML{line}: {problem}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} must contain lines of `key: value`")
    if config.get("num_machines", 1) != 1:
        config |= overrides or {}
    if num_processes is not None:
        config["num_processes"] = num_processes
    if str(config.get("num_processes")).isdecimal() and not config.get("use_cpu"):
        config["num_processes"] = int(config["num_processes"])  # the launcher accepts "2", too
    others = () if is_for_sagemaker(config) else (_in_processes, _in_machines, _in_devices)
    for problems in (_in_keys, *others):
        if problem := next(problems(config), None):  # stop: later checks rely on earlier ones
            raise UserError(f"{path}: {problem}")
    return config


def promise_of(config: dict) -> Promise:
    """Return what a valid config promises, even if this machine has too few GPUs.

    Call this only if `cannot_check` returns None.
    """
    import torch

    machines = config.get("num_machines", 1)
    processes = config.get("num_processes", 1) // machines * machines
    device = device_of(config)
    # MULTI_GPU and similar types create a process group even for a single process.
    is_connected = processes > 1 or starts_several(config)
    backend = torch.distributed.get_default_backend_for_device(device) if is_connected else "none"
    kind = kind_of(config) if is_connected else "none"
    return Promise(processes, backend, device, PRECISIONS[precision_of(config)], kind, machines)


def device_of(config: dict) -> str:
    """Return the kind of device that the config selects, such as "cpu" or "cuda"."""
    import torch

    if stays_on_cpu(config):
        return "cpu"
    accelerator = torch.accelerator.current_accelerator()  # not None in PyTorch for CUDA
    if accelerator and torch.accelerator.is_available():
        return accelerator.type
    kind = type_of(config)
    if kind.startswith("MULTI_") and kind != "MULTI_GPU":
        return kind.removeprefix("MULTI_").lower()
    return accelerator.type if accelerator else "cuda"


def type_of(config: dict) -> str:
    """Return the distributed_type. YAML reads NO without quotes as false."""
    return config["distributed_type"] or "NO"


def kind_of(config: dict) -> str:
    """Return the kind of distribution that a launch config with several processes selects."""
    if type_of(config) == "FSDP":
        return f"FSDP{fsdp_version(config)}"
    return OTHER_KINDS.get(type_of(config), "DDP")


def fsdp_version(config: dict) -> str:
    options = section_of(config, "fsdp_config")
    return str(options.get("fsdp_version", options.get("version", 1)))


def section_of(config: dict, name: str) -> dict:
    """Return a section, or an empty dict: Accelerate ignores a section that is not a dict."""
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def stays_on_cpu(config: dict) -> bool:
    """Return whether the config selects the CPU even on a machine with GPUs."""
    gpu_ids = config.get("gpu_ids") or "all"
    hidden = {gpu_id.strip() for gpu_id in gpu_ids.split(",")} == {"-1"}
    return bool(use_cpu_of(config)) or hidden or type_of(config) == "MULTI_CPU"


def use_cpu_of(config: dict) -> bool | None:
    """Return the value of use_cpu, or None if Accelerate would not understand it."""
    from accelerate.utils import str_to_bool

    try:
        return bool(str_to_bool(str(config.get("use_cpu", False))))
    except ValueError:
        return None


def uses_torchrun(config: dict) -> bool:
    """Return whether the launcher starts num_processes processes with torchrun's functions."""
    return type_of(config) not in ("NO", "MULTI_CPU", "XLA")


def starts_several(config: dict) -> bool:
    """Return False if the launcher ignores num_processes, as with "NO" or MULTI_CPU without MPI."""
    return uses_torchrun(config) or bool(section_of(config, "mpirun_config").get("mpirun_hostfile"))


def precision_of(config: dict) -> str:
    """Return "no", "bf16" or "fp16". The old key `fp16: true` also selects fp16."""
    default = "fp16" if config.get("fp16") else "no"
    return str(config.get("mixed_precision", default) or "no").lower()


def is_for_sagemaker(config: dict) -> bool:
    return config.get("compute_environment") == "AMAZON_SAGEMAKER"


def _in_keys(config: dict) -> Iterator[str]:
    from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig

    environment = config.get("compute_environment", "LOCAL_MACHINE")
    if environment not in ("LOCAL_MACHINE", "AMAZON_SAGEMAKER"):
        yield f"compute_environment must be LOCAL_MACHINE or AMAZON_SAGEMAKER, got {environment}"
    if "distributed_type" not in config:
        yield 'distributed_type is missing. Add distributed_type: "NO" or MULTI_GPU.'
    if is_for_sagemaker(config):
        return
    known = ClusterConfig.__dataclass_fields__
    # Like Accelerate, translate old keys before checking for unknown keys.
    for key in sorted(map(str, set(ClusterConfig.process_config(dict(config))) - set(known))):
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
        if key in SageMakerConfig.__dataclass_fields__:
            advice = "it needs compute_environment: AMAZON_SAGEMAKER"
        elif key == "ipex_config":
            advice = "Accelerate 1.13 and newer have no support for IPEX. Remove the section."
        else:
            advice = f"did you mean {close[0]}?" if close else "Accelerate rejects it"
        yield f"unknown key {key}: {advice}"


def _in_processes(config: dict) -> Iterator[str]:
    from accelerate.utils import DistributedType

    kind, types = config["distributed_type"], [known.value for known in DistributedType]
    if kind is False and "num_processes" not in config:
        yield 'YAML reads NO as false. Write distributed_type: "NO", in quotes.'
    if kind == "TPU":
        yield "distributed_type: TPU is now called XLA"
    if kind is not False and kind not in types:
        yield f"distributed_type must be one of {', '.join(types)}; got {kind}"
    if "num_processes" not in config and kind != "NO":
        yield f"{kind} needs num_processes. Add num_processes: 2, or use the flag --num-processes."
    for key in ("num_processes", "num_machines"):
        number = config.get(key, 1)
        if type(number) is not int or number < 1:  # `isinstance` would accept True
            yield f"{key} must be an integer of at least 1, got {number!r}"


def _in_machines(config: dict) -> Iterator[str]:
    machines = config.get("num_machines", 1)
    port = config.get("main_process_port")
    if port is not None and not (type(port) is int and 0 <= port < 65536):
        yield f"main_process_port must be from 0 (any free port) to 65535, got {port!r}"
    if machines == 1 or not uses_torchrun(config):
        return
    rank, address = config.get("machine_rank", 0), config.get("main_process_ip")
    if type(rank) is not int:
        yield f"machine_rank must be an integer, got {rank!r}"
    if address in (None, ""):
        yield "main_process_ip is missing. Add the address of machine 0."
    if not isinstance(address, str):
        yield f'main_process_ip must be an address in quotes, such as "192.168.1.10", got {address}'
    processes = config["num_processes"]
    if processes < machines:
        yield (
            f"num_processes must be at least num_machines: of {processes} processes on "
            f"{machines} machines, Accelerate would start none"
        )
    if port == 0:
        yield (
            "main_process_port: 0 works only on one machine, because each machine would choose "
            "its own port. Choose a port that is free on machine 0."
        )


def _in_devices(config: dict) -> Iterator[str]:
    kind, machines = type_of(config), config.get("num_machines", 1)
    gpu_ids = config.get("gpu_ids")
    if kind in ("NO", "MULTI_CPU") and use_cpu_of(config) is None:
        yield f"use_cpu must be true or false, got {config['use_cpu']!r}"
    if not isinstance(gpu_ids, str | None):
        yield f'gpu_ids must be in quotes. Write gpu_ids: "{gpu_ids}".'
    needs_two = kind.startswith("MULTI_") and kind != "MULTI_CPU" and machines == 1
    if needs_two and gpu_ids not in (None, "all") and "," not in gpu_ids:
        yield f'{kind} needs at least two gpu_ids, such as "0,1", got "{gpu_ids}"'
    if config.get("mixed_precision") is False:
        yield 'YAML reads no as false. Write mixed_precision: "no", in quotes.'
    if (precision := precision_of(config)) not in (*PRECISIONS, "fp8"):
        yield f'mixed_precision must be "no", bf16, fp16 or fp8, got {precision}'
