"""The files in a run's folder: JSON files, metrics.jsonl, and the model."""

import dataclasses
import json
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from accel_demo.config import TrainConfig
from accel_demo.errors import UserError, output_may_be_closed
from accel_demo.files import write_whole
from accel_demo.terminal import display
from accel_demo.typed_json import load_object, typed
from accel_demo.wording import counted


def describe_run(
    script: str, method: str, device: torch.device, mixed_precision: str
) -> dict[str, Any]:
    """Return the environment of a run: its script, processes, device and library versions.

    `script` is the name of the train file without ".py". `method` describes how it distributes the
    work, such as "DataParallel". The processes must already be connected.
    """
    is_connected = dist.is_initialized()
    packages = ("torch", "torchvision", "accelerate")
    return {
        "script": script,
        "processes": dist.get_world_size() if is_connected else 1,
        "backend": f"{method}, {dist.get_backend()}" if is_connected else method,
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        "mixed_precision": mixed_precision,
        "threads_per_process": torch.get_num_threads(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: metadata.version(name) for name in packages},
    }


def write_launch(folder: Path, config: TrainConfig, environment: dict, start: dict) -> None:
    """Write config.json, environment.json and start.json, and print one line about the launch.

    start.json contains the position from which this launch starts, so that programs need not read
    it from the printed text.
    """
    write_json(folder / "start.json", start)
    write_json(folder / "environment.json", environment)
    write_json(folder / "config.json", _choices(config))
    processes, samples = environment["processes"], config.batch_size * config.accumulate
    with output_may_be_closed():
        display(
            f"{counted(processes, 'process')} on {environment['device']} "
            f"({environment['backend']}): {config.model} on {config.dataset}, "
            f"{processes * samples} {config.sample}s per step"
        )


def append_metrics(folder: Path, values: dict) -> None:
    """Append a line to metrics.jsonl."""
    path = folder / "metrics.jsonl"
    with writing(path), open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")


def save_model(folder: Path, state_dict: dict[str, torch.Tensor]) -> None:
    """Write model.safetensors atomically."""
    from safetensors.torch import save

    tensors = {name: tensor.contiguous() for name, tensor in state_dict.items()}
    path = folder / "model.safetensors"
    with writing(path):
        write_whole(path, save(tensors), is_flushed=True)


def load_model(folder: Path, model: torch.nn.Module) -> None:
    """Load model.safetensors into `model`. Raises `UserError` if the file cannot be loaded."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / "model.safetensors"
    try:
        model.load_state_dict(load_file(path))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: the run has not finished") from None
    except (SafetensorError, RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} cannot be read ({reason}). Train the model again.") from None


def load_config(folder: Path) -> TrainConfig:
    """Return the config of a run. Raises `UserError` if config.json cannot be read."""
    path = folder / "config.json"
    choices = read_json(path)
    try:
        if choices.keys() != _choices(TrainConfig()).keys():
            raise ValueError("different fields")
        return typed(TrainConfig, {**choices, "run_dir": str(folder)}, path.name)
    except (ValueError, UserError):
        raise damaged_file(path) from None


def write_json(path: Path, value: dict) -> None:
    """Write `value` as indented JSON, atomically."""
    with writing(path):
        write_whole(path, json.dumps(value, indent=2) + "\n", is_flushed=True)


def read_json(path: Path) -> dict:
    """Return the object in a run's JSON file. Raises `UserError` if the file cannot be read."""
    try:
        return load_object(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path.parent} does not contain a run: {path} is missing") from None
    except (OSError, ValueError):
        raise damaged_file(path) from None


def damaged_file(path: Path) -> UserError:
    """Return the error for a file of a run folder that cannot be used."""
    return UserError(f"{path} is damaged or from a different version. Choose a different folder.")


def _choices(config: TrainConfig) -> dict:
    """Return the options to save, without `run_dir` (the folder may be moved) and `resume`."""
    choices = dataclasses.asdict(config)
    del choices["run_dir"], choices["resume"]
    return choices


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `UserError` if the block fails to write to `path`, a file or a folder."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error.strerror}). Fix this, then continue with --resume auto."
        ) from None
