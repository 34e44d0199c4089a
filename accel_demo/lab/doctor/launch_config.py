"""Read launch configs, check them for mistakes, and predict which processes they will start."""

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from accel_demo.errors import UserError

KEYS_WITHOUT_FLAG = {"fsdp_ignored_modules"}
NESTED = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_", "mpirun_config": ""}  # flag prefixes
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


def read_config(path: Path, overrides: dict | None = None) -> dict:
    """Read and check a launch config. Raises `UserError` if it contains a mistake.

    If the config is for several machines, `overrides` replaces some of its values.
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
    try:
        for check in CHECKS:
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
    # MULTI_GPU and similar types create a process group even for a single process.
    is_connected = processes > 1 or starts_several(config)
    backend = torch.distributed.get_default_backend_for_device(device) if is_connected else "none"
    kind = kind_of(config) if is_connected else "none"
    machines = config.get("num_machines", 1)
    return Promise(processes, backend, device, PRECISIONS[precision_of(config)], kind, machines)


def kind_of(config: dict) -> str:
    """Return the kind of distribution that a launch config with several processes selects."""
    if config["distributed_type"] == "FSDP":
        options = config.get("fsdp_config") or {}
        return f"FSDP{options.get('fsdp_version', options.get('version', 1))}"
    return OTHER_KINDS.get(config["distributed_type"], "DDP")


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
    if config.get("rdzv_backend", "static") != "static":
        raise UserError(
            f"rdzv_backend: {config['rdzv_backend']} has no effect in a file. Remove it, and "
            "launch with the flag --rdzv_backend."
        )
    flags = _flags_of_the_launcher()
    for part, prefix in NESTED.items():
        for key in map(str, config.get(part) or {}):
            if not {key, prefix + key} & {*flags, *KEYS_WITHOUT_FLAG}:
                raise UserError(f"{key} in {part} has no effect. Remove it, or correct it.")


def _flags_of_the_launcher() -> dict[str, Any]:
    """Return the default of each flag of `accelerate launch`, by name."""
    from accelerate.commands.launch import launch_command_parser

    return {action.dest: action.default for action in launch_command_parser()._actions}


def ignored_keys(config: dict) -> list[str]:
    """Return the keys that have no effect in a launch config.

    Accelerate reads a key only if its flag has no default. This does not apply to keys that it
    handles separately.
    """
    flags = _flags_of_the_launcher()
    return [
        key
        for key, value in config.items()
        if flags.get(key) is not None and value != flags[key] and not key.startswith("tpu_")
    ]


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


def _check_machines(config: dict) -> None:
    machines, kind = config.get("num_machines", 1), config["distributed_type"]
    if type(machines) is not int or machines < 1:
        raise UserError(f"num_machines must be an integer of at least 1, got {machines!r}")
    if machines == 1:
        return
    if kind in OTHER_KINDS or not starts_several(config):
        raise UserError(f"doctor cannot check {kind} on several machines. Use MULTI_GPU or FSDP.")
    rank, processes = config.get("machine_rank", 0), config["num_processes"]
    if type(rank) is not int:
        raise UserError(f"machine_rank must be an integer, got {rank!r}")
    address = config.get("main_process_ip")
    if address in (None, ""):
        raise UserError("main_process_ip is missing. Add the address of machine 0.")
    if not isinstance(address, str):
        raise UserError(
            f'main_process_ip must be an address in quotes, such as "192.168.1.10", got {address}'
        )
    if processes % machines:
        started = processes // machines * machines
        raise UserError(
            f"num_processes must be a multiple of num_machines: of {processes} processes on "
            f"{machines} machines, Accelerate would start only {started}"
        )


def _check_devices(config: dict) -> None:
    gpu_ids, use_cpu = config.get("gpu_ids"), config.get("use_cpu", False)
    if not isinstance(use_cpu, bool):
        raise UserError(f"use_cpu must be true or false, without quotes, got {use_cpu!r}")
    if gpu_ids is None or gpu_ids == "all":
        return
    if not isinstance(gpu_ids, str):
        raise UserError(f'gpu_ids must be in quotes. Write gpu_ids: "{gpu_ids}".')
    kind = config["distributed_type"]
    machines = config.get("num_machines", 1)
    if kind.startswith("MULTI_") and kind != "MULTI_CPU" and "," not in gpu_ids and machines == 1:
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
    started //= config.get("num_machines", 1)
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
    if config.get("num_machines", 1) > 1:
        if port == 0:
            raise UserError(
                "main_process_port: 0 works only on one machine, because each machine would choose "
                "its own port. Choose a port that is free on machine 0."
            )
    elif port and starts_several(config) and is_port_in_use(port):
        raise UserError(f"port {port} is in use. Write main_process_port: 0 for any free port.")


CHECKS = (
    *(_check_keys, _check_processes, _check_machines, _check_devices, _check_precision),
    _check_port,
)
