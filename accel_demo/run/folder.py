"""One run's folder: its config, metrics, environment and summary as JSON, its model."""

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
from accel_demo.run.manifest import MANIFEST, checkpoints_of, flush
from accel_demo.wording import counted


def claim_folder(config: TrainConfig, environment: dict) -> Path:
    """The folder of this run: `config.run_dir`, or one below runs/ that is like no other run's.

    Every process calls it and finds the same, before anything is written. A folder holds one config
    in one environment (see `describe_run`). The same run may be started over in it once it has
    ended, and be resumed, with another number of processes too; another run may not be started
    there. Raises `UserError` for that, and where the folder cannot be written to.
    """
    if config.resume not in ("", "auto") and not Path(config.resume, MANIFEST).is_file():
        raise UserError(
            f"{config.resume} is no checkpoint: name a folder in a run's checkpoints/, or give "
            "that run's --run-dir and --resume auto"
        )
    folder = _folder_of(config, environment)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(
            f"cannot write into {folder} ({error.strerror}): choose another --run-dir"
        ) from None
    if (folder / "config.json").exists():
        wanted = config.fixed_choices() | _launch(environment)
        held = load_config(folder).fixed_choices() | read_json(folder / "environment.json")
        if config.resume:  # it may go on with another number of them
            del wanted["processes"]
        for name, value in wanted.items():
            if held.get(name) != value:
                raise UserError(
                    f"{folder} holds a run with {name} {held.get(name)}, not {value}: "
                    "choose another --run-dir, or delete the folder"
                )
        has_ended = (folder / "summary.json").exists()
        if checkpoints_of(folder) and not has_ended and not config.resume:
            raise UserError(
                f"{folder} holds checkpoints of a run that has not ended: go on with "
                "--resume auto, or delete the folder to start over"
            )
    return folder


def start_run(folder: Path, config: TrainConfig, environment: dict) -> None:
    """Say and write down what is about to run. `Checkpoints` removes what an earlier start left."""
    write_json(folder / "environment.json", environment)
    write_json(folder / "config.json", _choices(config))
    processes, images = environment["processes"], config.batch_size * config.accumulate
    print(
        f"{counted(processes, 'process')} on {environment['device']} "
        f"({environment['backend']}): {config.model} on {config.dataset}, "
        f"{processes * images} images per step"
    )


def append_metrics(folder: Path, values: dict) -> None:
    """One line of metrics.jsonl."""
    path = folder / "metrics.jsonl"
    with _writing(path), open(path, "a") as file:
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
    choices = read_json(path)
    try:
        if choices.keys() != _choices(TrainConfig()).keys():
            raise UserError("other fields")
        return TrainConfig(**choices, run_dir=str(folder))
    except (TypeError, UserError):
        raise UserError(
            f"{path} is damaged or of another version: choose another folder, or delete this one"
        ) from None


def write_json(path: Path, value: dict) -> None:
    """Write `value` as indented JSON: whole or not at all."""
    _write_whole(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path) -> dict:
    """The object in a JSON file. Raises `UserError` where there is none."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path.parent} holds no run: {path} is missing") from None
    except (OSError, ValueError):
        value = None
    if not isinstance(value, dict):
        raise UserError(
            f"{path} is damaged or of another version: choose another folder, or delete this one"
        )
    return value


def _folder_of(config: TrainConfig, environment: dict) -> Path:
    """runs/train for the defaults; every other choice shows in the name, or as a digest in it."""
    if config.run_dir:
        return Path(config.run_dir)
    if config.resume not in ("", "auto"):
        saved_in = Path(config.resume).resolve().parent
        if saved_in.name == "checkpoints":
            return saved_in.parent  # the folder of the run that saved it
    launch = _launch(environment)
    name = launch["telling"]
    if launch["processes"] > 1:
        name += f"-{launch['processes']}-processes"
    if launch["mixed_precision"] != "no":
        name += f"-{launch['mixed_precision']}"
    if config.fixed_choices() != TrainConfig().fixed_choices():
        name += f"-{hashlib.sha256(json.dumps(config.fixed_choices()).encode()).hexdigest()[:8]}"
    return Path("runs", name)


def _choices(config: TrainConfig) -> dict:
    """The config without where this start of it came from, so that a run folder may be moved."""
    choices = dataclasses.asdict(config)
    del choices["run_dir"], choices["resume"]
    return choices


def _launch(environment: dict) -> dict:
    """What of the environment makes it another run."""
    return {name: environment[name] for name in ("telling", "processes", "mixed_precision")}


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
            f"cannot write {path} ({error.strerror}), so the training stops: mend that, and go on "
            "from the last checkpoint with --resume auto"
        ) from None
