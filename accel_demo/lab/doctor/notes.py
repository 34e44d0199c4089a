"""Find what Accelerate ignores in a launch config, and what doctor cannot check.

The names of all keys come from the installed version of Accelerate.
"""

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Section:
    """A nested section of a launch config."""

    prefix: str  # of the flags that its keys stand for
    adds_prefix: bool  # True if Accelerate adds the prefix to a key without it
    needs: str  # when Accelerate reads the section, in words
    is_read: Callable[[dict], bool]


def _has_type(kind: str) -> Callable[[dict], bool]:
    return lambda config: type_of(config) == kind


SECTIONS = {
    "fsdp_config": Section("fsdp_", True, "distributed_type: FSDP", _has_type("FSDP")),
    "deepspeed_config": Section("", False, "distributed_type: DEEPSPEED", _has_type("DEEPSPEED")),
    "megatron_lm_config": Section(
        "megatron_lm_", False, "distributed_type: MEGATRON_LM", _has_type("MEGATRON_LM")
    ),
    "fp8_config": Section(
        "fp8_", True, "mixed_precision: fp8", lambda config: precision_of(config) == "fp8"
    ),
    "parallelism_config": Section(
        "parallelism_config_", False, "a distributed_type such as FSDP", uses_torchrun
    ),
    "dynamo_config": Section(
        "dynamo_",
        True,
        "a distributed_type other than DEEPSPEED and XLA",
        lambda config: type_of(config) not in ("DEEPSPEED", "XLA"),
    ),
    "mpirun_config": Section(
        "mpirun_",
        False,
        "distributed_type: MULTI_CPU",
        lambda config: type_of(config) in ("NO", "MULTI_CPU"),
    ),
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
    for name, section in SECTIONS.items():
        yield from _in_section(config, name, section)
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


def _in_section(config: dict, name: str, section: Section) -> Iterator[str]:
    if not (content := config.get(name)):
        return
    if not section.is_read(config):
        yield f"Accelerate ignores {name} here: it needs {section.needs}."
        return
    if not isinstance(content, dict):
        yield f"Accelerate ignores {name}: it must contain lines of `key: value`."
        return
    known = known_keys(name)
    for key in map(str, content):
        full = section.prefix + key
        if key in known or (section.adds_prefix and full in known):
            continue
        names = {one.removeprefix(section.prefix): one for one in known}
        names |= {one: one for one in known}
        close = difflib.get_close_matches(key, names, n=1, cutoff=0.65)
        advice = f"Did you mean {names[close[0]]}?" if close else "Remove it, or correct it."
        yield f"Accelerate ignores {key} in {name}. {advice}"


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

    if prefix := SECTIONS[section].prefix:
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
