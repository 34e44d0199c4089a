"""Read launch configs, check them for mistakes, and predict which processes they will start."""

import difflib
from collections.abc import Iterator
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
    for problems in (_in_keys, _in_processes, _in_machines, _in_devices):
        if problem := next(problems(config), None):  # stop: later checks rely on earlier ones
            raise UserError(f"{path}: {problem}")
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


def _flags_of_the_launcher() -> dict[str, Any]:
    """Return the default of each flag of `accelerate launch`, by name."""
    from accelerate.commands.launch import launch_command_parser

    return {action.dest: action.default for action in launch_command_parser()._actions}


def _in_keys(config: dict) -> Iterator[str]:
    from accelerate.commands.config.config_args import ClusterConfig

    if config.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        yield "only compute_environment: LOCAL_MACHINE is supported. Remove the key."
    if "distributed_type" not in config:
        yield 'distributed_type is missing. Add distributed_type: "NO" or MULTI_GPU.'
    known = set(ClusterConfig.__dataclass_fields__)
    # Like Accelerate, translate old keys before checking for unknown keys.
    unknown = set(ClusterConfig.process_config(dict(config))) - known
    for key in sorted(map(str, unknown)):
        close = difflib.get_close_matches(key, known, n=1)
        advice = f"did you mean {close[0]}?" if close else "Accelerate rejects it"
        yield f"unknown key {key}: {advice}"
    if (backend := config.get("rdzv_backend", "static")) != "static":
        yield (
            f"rdzv_backend: {backend} has no effect in a file. Remove it, and "
            "launch with the flag --rdzv_backend."
        )
    flags = _flags_of_the_launcher()
    for part, prefix in NESTED.items():
        for key in map(str, config.get(part) or {}):
            if not {key, prefix + key} & {*flags, *KEYS_WITHOUT_FLAG}:
                yield f"{key} in {part} has no effect. Remove it, or correct it."


def _in_processes(config: dict) -> Iterator[str]:
    from accelerate.utils import DistributedType

    kind, types = config["distributed_type"], [known.value for known in DistributedType]
    if kind is False:
        yield 'YAML reads NO as false. Write distributed_type: "NO", in quotes.'
    if kind not in types:
        yield f"distributed_type must be one of {', '.join(types)}; got {kind}"
    if "num_processes" not in config and kind != "NO":
        yield f"{kind} needs num_processes. Add num_processes: 2, for example."
    for key in ("num_processes", "num_machines"):
        number = config.get(key, 1)
        if type(number) is not int or number < 1:  # `isinstance` would accept True
            yield f"{key} must be an integer of at least 1, got {number!r}"


def _in_machines(config: dict) -> Iterator[str]:
    from accelerate.utils.other import is_port_in_use

    kind, machines = config["distributed_type"], config.get("num_machines", 1)
    port = config.get("main_process_port")
    if port is not None and not (type(port) is int and 0 <= port < 65536):
        yield f"main_process_port must be from 0 (any free port) to 65535, got {port!r}"
    if machines == 1:
        if port and starts_several(config) and is_port_in_use(port):
            yield f"port {port} is in use. Write main_process_port: 0 for any free port."
        return
    if kind in OTHER_KINDS or not starts_several(config):
        yield f"doctor cannot check {kind} on several machines. Use MULTI_GPU or FSDP."
    rank, address = config.get("machine_rank", 0), config.get("main_process_ip")
    if type(rank) is not int:
        yield f"machine_rank must be an integer, got {rank!r}"
    if address in (None, ""):
        yield "main_process_ip is missing. Add the address of machine 0."
    if not isinstance(address, str):
        yield f'main_process_ip must be an address in quotes, such as "192.168.1.10", got {address}'
    processes = config["num_processes"]
    if processes % machines:
        yield (
            f"num_processes must be a multiple of num_machines: of {processes} processes on "
            f"{machines} machines, Accelerate would start only {processes // machines * machines}"
        )
    if port == 0:
        yield (
            "main_process_port: 0 works only on one machine, because each machine would choose "
            "its own port. Choose a port that is free on machine 0."
        )


def _in_devices(config: dict) -> Iterator[str]:
    import torch

    kind, machines = config["distributed_type"], config.get("num_machines", 1)
    gpu_ids, use_cpu = config.get("gpu_ids"), config.get("use_cpu", False)
    if not isinstance(use_cpu, bool):
        yield f"use_cpu must be true or false, without quotes, got {use_cpu!r}"
    if not isinstance(gpu_ids, str | None):
        yield f'gpu_ids must be in quotes. Write gpu_ids: "{gpu_ids}".'
    needs_two = kind.startswith("MULTI_") and kind != "MULTI_CPU" and machines == 1
    if needs_two and gpu_ids not in (None, "all") and "," not in gpu_ids:
        yield f'{kind} needs at least two gpu_ids, such as "0,1", got "{gpu_ids}"'
    if config.get("mixed_precision") is False:
        yield 'YAML reads no as false. Write mixed_precision: "no", in quotes.'
    precision = precision_of(config)
    if precision not in PRECISIONS:
        yield f'mixed_precision must be "no", bf16 or fp16, got {precision}'
    started = config.get("num_processes", 1) if starts_several(config) else 1
    has_gpus = torch.accelerator.device_count() >= started // machines
    if precision == "fp16" and (stays_on_cpu(config) or not has_gpus):
        yield (
            "fp16 needs a GPU for each process, but this config would run on the CPU. "
            'Set mixed_precision to bf16 or "no".'
        )
