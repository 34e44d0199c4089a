"""The folder of a run: config, environment, metrics and summary as JSON, and the model."""

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from accel_demo.config import TrainConfig
from accel_demo.errors import UserError
from accel_demo.processes.environment import nodes_may_change
from accel_demo.run.manifest import MANIFEST, checkpoints_of, flush
from accel_demo.wording import counted


def make_folder(config: TrainConfig, environment: dict) -> tuple[Path, bool]:
    """Create the folder of this run, if necessary. Return it, and whether it is new.

    The folder is `config.run_dir`, or a folder in runs/ named after the config. Raises `UserError`
    if it is not writable, if `--resume` is not a checkpoint, or if an elastic launch has no
    `--run-dir`.
    """
    if config.resume not in ("", "auto") and not Path(config.resume, MANIFEST).is_file():
        raise UserError(
            f"{config.resume} is not a checkpoint. Choose a folder in a run's checkpoints/, or use "
            "the run's --run-dir with --resume auto."
        )
    if not config.run_dir and config.resume in ("", "auto") and nodes_may_change():
        raise UserError(
            "this launch can change its number of processes, which is part of the name of the "
            "default run folder. Choose a folder with --run-dir."
        )
    folder = folder_of(config, environment)
    try:
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(
            f"cannot write to {folder} ({error.strerror}). Choose a different --run-dir."
        ) from None
    return folder, is_new


def check_folder(folder: Path, config: TrainConfig, environment: dict) -> None:
    """Raise `UserError` if this run may not use the folder.

    A folder contains one run: one config in one environment (see `describe_run`). A run can be
    resumed in its folder, even with a different number of processes. A finished run can be started
    again. An unfinished run can only be resumed.
    """
    if (folder / "config.json").exists():
        wanted = config.fixed_choices() | _launch(environment)
        held = load_config(folder).fixed_choices() | read_json(folder / "environment.json")
        if "script" not in held:
            raise _unusable(folder / "environment.json")
        if config.resume:  # a run may continue with a different number of processes
            del wanted["processes"]
        for name, value in wanted.items():
            if held.get(name) != value:
                raise UserError(
                    f"{folder} contains a run with {name} {held.get(name)}, not {value}. "
                    "Choose a different --run-dir, or delete the folder."
                )
        has_ended = (folder / "summary.json").exists()
        if checkpoints_of(folder) and not has_ended and not config.resume:
            raise UserError(
                f"{folder} contains an unfinished run. Continue it with --resume auto, or delete "
                "the folder to start again."
            )


def start_run(folder: Path, config: TrainConfig, environment: dict, start: dict) -> None:
    """Write config.json and environment.json, and print one line that describes the run.

    environment.json contains `environment` and, under the key "start", the position from which this
    launch starts, so that programs need not read it from the printed text.
    """
    write_json(folder / "environment.json", {**environment, "start": start})
    write_json(folder / "config.json", _choices(config))
    processes, images = environment["processes"], config.batch_size * config.accumulate
    print(
        f"{counted(processes, 'process')} on {environment['device']} "
        f"({environment['backend']}): {config.model} on {config.dataset}, "
        f"{processes * images} images per step"
    )


def append_metrics(folder: Path, values: dict) -> None:
    """Append a line to metrics.jsonl."""
    path = folder / "metrics.jsonl"
    with _writing(path), open(path, "a") as file:
        file.write(json.dumps(values) + "\n")


def save_model(folder: Path, state_dict: dict[str, torch.Tensor]) -> None:
    """Write model.safetensors atomically."""
    from safetensors.torch import save

    tensors = {name: tensor.contiguous() for name, tensor in state_dict.items()}
    _write_whole(folder / "model.safetensors", save(tensors))


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
            raise UserError("different fields")
        return TrainConfig(**choices, run_dir=str(folder))
    except (TypeError, UserError):
        raise _unusable(path) from None


def write_json(path: Path, value: dict) -> None:
    """Write `value` as indented JSON, atomically."""
    _write_whole(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path) -> dict:
    """Return the object in a run's JSON file. Raises `UserError` if the file cannot be read."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path.parent} does not contain a run: {path} is missing") from None
    except (OSError, ValueError):
        value = None
    if not isinstance(value, dict):
        raise _unusable(path)
    return value


def _unusable(path: Path) -> UserError:
    return UserError(
        f"{path} is damaged or from a different version. Choose a different folder, or delete "
        "this one."
    )


def folder_of(config: TrainConfig, environment: dict) -> Path:
    """Return the folder that `--run-dir` or `--resume` selects, or else a folder in runs/.

    A folder in runs/ is named after the launch. If any fixed option is not the default, a digest
    of the fixed options is appended to the name.
    """
    if config.run_dir:
        return Path(config.run_dir)
    if config.resume not in ("", "auto"):
        saved_in = Path(config.resume).resolve().parent
        if saved_in.name == "checkpoints":
            return saved_in.parent
    launch = _launch(environment)
    name = launch["script"]
    if launch["processes"] > 1:
        name += f"-{launch['processes']}-processes"
    if launch["mixed_precision"] != "no":
        name += f"-{launch['mixed_precision']}"
    if config.fixed_choices() != TrainConfig().fixed_choices():
        name += f"-{hashlib.sha256(json.dumps(config.fixed_choices()).encode()).hexdigest()[:8]}"
    return Path("runs", name)


def _choices(config: TrainConfig) -> dict:
    """Return the options to save, without `run_dir` (the folder may be moved) and `resume`."""
    choices = dataclasses.asdict(config)
    del choices["run_dir"], choices["resume"]
    return choices


def _launch(environment: dict) -> dict:
    """Return the part of the environment that identifies a run."""
    return {name: environment[name] for name in ("script", "processes", "mixed_precision")}


def _write_whole(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with _writing(path):
        try:
            temporary.write_bytes(content)
            flush(temporary)
            os.replace(temporary, path)
            flush(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error.strerror}). Fix this, then continue with --resume auto."
        ) from None
