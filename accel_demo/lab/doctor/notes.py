"""Find what Accelerate ignores in a launch config, and what doctor cannot check.

The names of all keys come from the installed version of Accelerate.
"""

import difflib
from collections.abc import Iterator
from typing import Any

from accel_demo.lab.doctor.launch_config import (
    OTHER_KINDS,
    device_of,
    fsdp_version,
    is_for_sagemaker,
    precision_of,
    section_of,
    starts_several,
    type_of,
    uses_torchrun,
)

# The prefix of the flags that the keys in a section stand for. In some sections, Accelerate adds it
# to keys without it. The flags for DeepSpeed have no prefix.
PREFIXES = {
    "fsdp_config": "fsdp_",
    "deepspeed_config": "",
    "megatron_lm_config": "megatron_lm_",
    "fp8_config": "fp8_",
    "parallelism_config": "parallelism_config_",
    "dynamo_config": "dynamo_",
    "mpirun_config": "mpirun_",
}
ADDS_PREFIX = {"fsdp_config", "fp8_config", "dynamo_config"}
NEEDED_TYPES = {
    "fsdp_config": "FSDP",
    "deepspeed_config": "DEEPSPEED",
    "megatron_lm_config": "MEGATRON_LM",
}
# Keys that Accelerate reads although it has no flag for them
KEYS_WITHOUT_FLAG = {"fsdp_config": {"fsdp_ignored_modules"}, "mpirun_config": {"bind-to"}}
TPU_KEYS = {"command_file", "commands", "downcast_bf16", "main_training_function"}
# Accelerate handles `debug` separately. `same_network` makes no difference: in both cases, a static
# rendezvous uses main_process_ip.
NOT_IGNORED = {"debug", "same_network"}
PARALLELISM = {
    "tp_size": "Tensor parallelism",
    "cp_size": "Context parallelism",
    "sp_size": "Sequence parallelism",
}


def notes_on_config(config: dict) -> Iterator[str]:
    """Yield a line for each part of a valid config that has no effect, or an unexpected one.

    Accelerate launches the config all the same.
    """
    if is_for_sagemaker(config):
        return
    if config["distributed_type"] is False:
        yield 'YAML reads NO as false. Write distributed_type: "NO", in quotes.'
    if "fp16" in config:
        yield "fp16 is an old key. Write mixed_precision instead."
    if "dynamo_backend" in config:
        yield "dynamo_backend is an old key. Write it into the section dynamo_config."
    for name in PREFIXES:
        yield from _in_section(config, name)
    yield from _in_fsdp2(config)
    yield from _in_flags(config)
    yield from _in_launch(config)


def cannot_check(config: dict) -> str | None:
    """Return why doctor cannot launch a valid config to check it, or None if it can."""
    kind, machines = type_of(config), config.get("num_machines", 1)
    if is_for_sagemaker(config):
        return "Amazon SageMaker: the training would run there, not on this machine"
    if kind == "XLA":
        return "XLA: it needs TPUs, and Accelerate starts processes on them in a different way"
    if precision_of(config) == "fp8":
        return "fp8: it needs a GPU and a library that compute in fp8"
    if machines > 1 and (kind in OTHER_KINDS or not uses_torchrun(config)):
        return f"{kind} on several machines, only MULTI_GPU and FSDP"
    device = device_of(config)
    if starts_several(config) and not _has_backend(device):
        return f"{kind}: this PyTorch does not support the device {device}"
    if has_enough_gpus(config):
        for kind in ("Tensor parallelism", "Sequence parallelism"):
            if kind in parallelism_of(config):
                return f"{kind.lower()}: it needs a model from Transformers"
    return None


def has_enough_gpus(config: dict) -> bool:
    """Return whether each process on this machine could have its own GPU."""
    import torch

    processes = config.get("num_processes", 1) // config.get("num_machines", 1)
    return torch.accelerator.device_count() >= processes


def parallelism_of(config: dict) -> list[str]:
    """Return the kinds of parallelism that a parallelism_config selects beside data parallelism."""
    options = section_of(config, "parallelism_config") if uses_torchrun(config) else {}
    return [
        kind
        for key, kind in PARALLELISM.items()
        if options.get(f"parallelism_config_{key}") not in (None, 1)
    ]


def _has_backend(device: str) -> bool:
    import torch

    try:
        torch.distributed.get_default_backend_for_device(device)
    except (RuntimeError, ValueError):  # torch does not know the device, or a backend for it
        return False
    return True


def _in_section(config: dict, name: str) -> Iterator[str]:
    if not (content := config.get(name)):
        return
    if needed := _what_a_section_needs(config, name):
        yield f"Accelerate ignores {name} here: it needs {needed}."
        return
    if not isinstance(content, dict):
        yield f"Accelerate ignores {name}: it must contain lines of `key: value`."
        return
    known, prefix = known_keys(name), PREFIXES[name]
    short = {key.removeprefix(prefix): key for key in known}
    unknown = []
    for key in map(str, content):
        if key in known or (name in ADDS_PREFIX and key in short):
            continue
        if close := difflib.get_close_matches(key, [*short, *known], n=1, cutoff=0.65):
            right = short.get(close[0], close[0])
            yield f"Accelerate ignores {key} in {name}. Did you mean {right}?"
        else:
            unknown.append(key)
    if unknown:
        advice = " Only the file in deepspeed_config_file can have DeepSpeed's own keys."
        advice = advice if name == "deepspeed_config" else ""
        yield f"Accelerate ignores {', '.join(unknown)} in {name}.{advice}"


def _what_a_section_needs(config: dict, name: str) -> str | None:
    """Return what the config must contain so that Accelerate reads a section, or None if it does.

    Source: the functions `prepare_..._env` in `accelerate/utils/launch.py`.
    """
    kind = type_of(config)
    if kind != (needed := NEEDED_TYPES.get(name, kind)):
        return f"distributed_type: {needed}"
    if name == "fp8_config" and precision_of(config) != "fp8":
        return "mixed_precision: fp8"
    if name == "parallelism_config" and not uses_torchrun(config):
        return "a distributed_type such as FSDP"
    if name == "dynamo_config" and kind in ("DEEPSPEED", "XLA"):
        return f"a distributed_type other than {kind}"
    if name == "mpirun_config" and kind not in ("NO", "MULTI_CPU"):
        return "distributed_type: MULTI_CPU"
    return None


def _in_fsdp2(config: dict) -> Iterator[str]:
    """Yield a line if FSDP2 ignores keys for FSDP1, according to `accelerate to-fsdp2`."""
    from accelerate.commands.to_fsdp2 import ARGUMENT_KEY_MAPPING as NEW_KEYS

    keys = section_of(config, "fsdp_config") if type_of(config) == "FSDP" else {}
    ignored = [key for key in keys if NEW_KEYS.get(key, key) != key]
    if fsdp_version(config) == "2" and ignored:
        yield f"FSDP2 ignores {', '.join(ignored)}: see `accelerate to-fsdp2 --help`."


def known_keys(section: str) -> set[str]:
    """Return the keys that Accelerate reads from a section, with their prefix."""
    from accelerate.commands.launch import launch_command_parser

    if prefix := PREFIXES[section]:
        keys = {key for key in flags_of_the_launcher() if key.startswith(prefix)}
        return keys | KEYS_WITHOUT_FLAG.get(section, set())
    groups = {group.title: group for group in launch_command_parser()._action_groups}
    return {action.dest for action in groups["DeepSpeed Arguments"]._group_actions}


def _in_flags(config: dict) -> Iterator[str]:
    """Yield a line for each key that Accelerate reads only as a flag, or only on TPUs.

    Accelerate reads a key only if its flag has no default. This does not apply to keys that it
    handles separately.
    """
    from accelerate.commands.config.config_args import ClusterConfig

    fields, flags = ClusterConfig.__dataclass_fields__, flags_of_the_launcher()
    for_tpus = []
    for key, value in config.items():
        is_default = key in fields and value == fields[key].default
        if is_default or key in NOT_IGNORED or value in (None, False, "no", []):
            continue
        if key.startswith("tpu_") or key in TPU_KEYS:
            for_tpus.append(key)
        elif key == "rdzv_backend" and config.get("num_machines", 1) == 1:
            yield f"rdzv_backend: {value} has no effect in a file. The launch uses static."
        elif flags.get(key) is not None and value != flags[key]:
            flag = f"--{key}" if value is True else f"--{key} {value}"
            yield f"Accelerate ignores {key} in a file, and reads only the flag {flag}."
    if for_tpus and type_of(config) != "XLA":
        yield f"Accelerate uses {', '.join(for_tpus)} only on TPUs, with distributed_type: XLA."


def _in_launch(config: dict) -> Iterator[str]:
    from accelerate.utils.other import is_port_in_use

    processes, machines = config.get("num_processes", 1), config.get("num_machines", 1)
    port = config.get("main_process_port")
    if machines == 1 and port and uses_torchrun(config) and is_port_in_use(port):
        yield f"port {port} is in use, so Accelerate uses another one."
    if uses_torchrun(config) and processes % machines:
        yield (
            f"Accelerate starts only {processes // machines * machines} of {processes} processes, "
            f"because {processes} is not a multiple of {machines} machines."
        )


def flags_of_the_launcher() -> dict[str, Any]:
    """Return the default of each flag of `accelerate launch`, by name."""
    from accelerate.commands.launch import launch_command_parser

    return {action.dest: action.default for action in launch_command_parser()._actions}
