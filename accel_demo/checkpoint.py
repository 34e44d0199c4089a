"""One run's folder: its config, metrics, environment and summary as JSON, its model."""

import dataclasses
import hashlib
import json
import os
import tempfile
from pathlib import Path

import torch

from accel_demo.config import TrainConfig
from accel_demo.errors import UserError


def run_folder(config: TrainConfig, telling: str) -> Path:
    """`config.run_dir`, or a folder below runs/ that every process finds by itself.

    A run with the defaults is named after the train file; any other choice adds a digest of it, so
    that two different runs never meet.
    """
    if config.run_dir:
        return Path(config.run_dir)
    if config == TrainConfig():
        return Path("runs", telling)
    digest = hashlib.sha256(json.dumps(_choices(config)).encode()).hexdigest()
    return Path("runs", f"{telling}-{digest[:8]}")


def check_folder(folder: Path, config: TrainConfig) -> None:
    """Raise `UserError` where a run cannot be kept in `folder`, before anything is started.

    A folder holds one config: the same run may be started over in it, another one may not.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(
            f"cannot write into {folder} ({error.strerror}): choose another --run-dir"
        ) from None
    if not (folder / "config.json").exists():
        return
    held = dataclasses.asdict(load_config(folder))
    for name, value in _choices(config).items():
        if held[name] != value:
            raise UserError(
                f"{folder} holds a run with {name} {held[name]}, not {value}: "
                "choose another --run-dir, or delete the folder"
            )


def start_run(folder: Path, config: TrainConfig, environment: dict) -> None:
    """Clear what an earlier start of the same run left; say and write down what is about to run."""
    for name in ("metrics.jsonl", "model.safetensors", "summary.json"):
        (folder / name).unlink(missing_ok=True)
    write_json(folder / "environment.json", environment)
    write_json(folder / "config.json", _choices(config))
    processes, images = environment["processes"], config.batch_size * config.accumulate
    print(
        f"{processes} process{'es' if processes > 1 else ''} on {environment['device']} "
        f"({environment['backend']}): {config.model} on {config.dataset}, "
        f"{processes * images} images per step"
    )


def append_metrics(folder: Path, values: dict) -> None:
    """One line of metrics.jsonl."""
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(values) + "\n")


def save_model(folder: Path, state_dict: dict[str, torch.Tensor]) -> None:
    """Write model.safetensors: whole or not at all. Tensors alone, no code, no pickle."""
    from safetensors.torch import save

    tensors = {name: tensor.contiguous() for name, tensor in state_dict.items()}
    _write_whole(folder / "model.safetensors", save(tensors))


def load_model(folder: Path, model: torch.nn.Module) -> None:
    """Read model.safetensors into `model`. Raises `UserError` where that is not possible."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / "model.safetensors"
    try:
        model.load_state_dict(load_file(path))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: the run has not finished") from None
    except (SafetensorError, RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} cannot be read ({reason}): train it again") from None


def load_config(folder: Path) -> TrainConfig:
    """The config a run was started with. Raises `UserError` where there is none."""
    path = folder / "config.json"
    try:
        choices = json.loads(path.read_text())
        if choices.keys() != _choices(TrainConfig()).keys():
            raise ValueError
        return TrainConfig(**choices, run_dir=str(folder))
    except FileNotFoundError:
        raise UserError(f"{folder} holds no run: {path} is missing") from None
    except (OSError, ValueError, TypeError, AttributeError, UserError):
        raise UserError(
            f"{path} is damaged or of another version: choose another folder, or delete this one"
        ) from None


def write_json(path: Path, value: dict) -> None:
    """Write `value` as indented JSON: whole or not at all."""
    _write_whole(path, (json.dumps(value, indent=2) + "\n").encode())


def _choices(config: TrainConfig) -> dict:
    """The config without the folder it is kept in, so that a run folder may be moved."""
    choices = dataclasses.asdict(config)
    del choices["run_dir"]
    return choices


def _write_whole(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    os.replace(temporary, path)
