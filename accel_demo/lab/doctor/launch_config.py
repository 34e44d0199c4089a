"""Read launch configs, check them for mistakes, and predict which processes they will start."""

import difflib
from dataclasses import dataclass
from pathlib import Path

import yaml

from accel_demo.errors import UserError

PRECISIONS = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Promise:
    """The processes that a launch config should start."""

    processes: int
    backend: str  # "gloo" or "nccl"; "none" if there is no process group
    device: str  # such as "cpu" or "cuda"
    dtype: str  # of layer outputs: "float32", "bfloat16" or "float16"


@dataclass(frozen=True)
class ProbeAnswer:
    """What one launched process reports. The last two fields are results of collectives."""

    rank: int
    world_size: int
    backend: str
    device: str  # such as "cpu" or "cuda:0"
    dtype: str
    pid: int
    gathered_pids: list[int]
    sum_of_ranks: float  # as if ranks were numbered from 1


def read_config(path: Path) -> dict:
    """Read and check a launch config. Raises `UserError` if it contains a mistake."""
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
    try:
        for check in (_check_keys, _check_processes, _check_devices, _check_precision, _check_port):
            check(config)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return config


def promise_of(config: dict) -> Promise:
    """Return what a valid config promises, even if this machine has too few GPUs."""
    import torch

    processes = config.get("num_processes", 1)
    device = "cpu"
    if not stays_on_cpu(config):
        accelerator = torch.accelerator.current_accelerator()
        device = accelerator.type if accelerator else "cuda"
    # On a GPU, MULTI_GPU and similar types create a process group even for a single process.
    is_connected = processes > 1 or (starts_several(config) and device != "cpu")
    backend = torch.distributed.get_default_backend_for_device(device) if is_connected else "none"
    return Promise(processes, backend, device, PRECISIONS[precision_of(config)])


def stays_on_cpu(config: dict) -> bool:
    """Return whether the config selects the CPU even on a machine with GPUs."""
    gpu_ids = config.get("gpu_ids") or "all"
    hidden = {gpu_id.strip() for gpu_id in gpu_ids.split(",")} == {"-1"}
    return bool(config.get("use_cpu")) or hidden or config["distributed_type"] == "MULTI_CPU"


def starts_several(config: dict) -> bool:
    """Return False if the launcher ignores num_processes, as with "NO" or MULTI_CPU without MPI."""
    kind = config["distributed_type"]
    return kind != "NO" and (kind != "MULTI_CPU" or bool(config.get("mpirun_config")))


def precision_of(config: dict) -> str:
    """Return "no", "bf16" or "fp16". The old key `fp16: true` also selects fp16."""
    default = "fp16" if config.get("fp16") else "no"
    return str(config.get("mixed_precision", default) or "no").lower()


def _check_keys(config: dict) -> None:
    from accelerate.commands.config.config_args import ClusterConfig

    if config.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise UserError("only compute_environment: LOCAL_MACHINE is supported. Remove the key.")
    if "distributed_type" not in config:
        raise UserError('distributed_type is missing. Add distributed_type: "NO" or MULTI_GPU.')
    known = set(ClusterConfig.__dataclass_fields__)
    # Like Accelerate, translate old keys before checking for unknown keys.
    unknown = set(ClusterConfig.process_config(dict(config))) - known
    for key in sorted(map(str, unknown)):
        close = difflib.get_close_matches(key, known, n=1)
        advice = f"did you mean {close[0]}?" if close else "Accelerate rejects it"
        raise UserError(f"unknown key {key}: {advice}")
    if config.get("num_machines", 1) != 1:
        raise UserError("num_machines must be 1 here, because doctor uses only this machine")


def _check_processes(config: dict) -> None:
    from accelerate.utils import DistributedType

    kind, types = config["distributed_type"], [known.value for known in DistributedType]
    if kind is False:
        raise UserError('YAML reads NO as false. Write distributed_type: "NO", in quotes.')
    if kind not in types:
        raise UserError(f"distributed_type must be one of {', '.join(types)}; got {kind}")
    processes = config.get("num_processes")
    if "num_processes" not in config:
        if kind != "NO":
            raise UserError(f"{kind} needs num_processes. Add num_processes: 2, for example.")
    elif type(processes) is not int or processes < 1:  # `isinstance` would accept True
        raise UserError(f"num_processes must be an integer of at least 1, got {processes!r}")


def _check_devices(config: dict) -> None:
    gpu_ids, use_cpu = config.get("gpu_ids"), config.get("use_cpu", False)
    if not isinstance(use_cpu, bool):
        raise UserError(f"use_cpu must be true or false, without quotes, got {use_cpu!r}")
    if gpu_ids is None or gpu_ids == "all":
        return
    if not isinstance(gpu_ids, str):
        raise UserError(f'gpu_ids must be in quotes. Write gpu_ids: "{gpu_ids}".')
    kind = config["distributed_type"]
    if kind.startswith("MULTI_") and kind != "MULTI_CPU" and "," not in gpu_ids:
        raise UserError(f'{kind} needs at least two gpu_ids, such as "0,1", got "{gpu_ids}"')


def _check_precision(config: dict) -> None:
    import torch

    if config.get("mixed_precision") is False:
        raise UserError('YAML reads no as false. Write mixed_precision: "no", in quotes.')
    precision = precision_of(config)
    if precision not in PRECISIONS:
        raise UserError(f'mixed_precision must be "no", bf16 or fp16, got {precision}')
    if precision != "fp16":
        return
    started = config.get("num_processes", 1) if starts_several(config) else 1
    accelerators = torch.accelerator.device_count()
    if stays_on_cpu(config) or accelerators < started:
        raise UserError(
            "fp16 needs a GPU for each process, but this config would run on the CPU. "
            'Set mixed_precision to bf16 or "no".'
        )


def _check_port(config: dict) -> None:
    from accelerate.utils.other import is_port_in_use

    port = config.get("main_process_port")
    if port is None:
        return
    if type(port) is not int or not 0 <= port < 65536:
        raise UserError(f"main_process_port must be from 0 (any free port) to 65535, got {port!r}")
    if port and starts_several(config) and is_port_in_use(port):
        raise UserError(f"port {port} is in use. Write main_process_port: 0 for any free port.")
