"""List the runs in runs/ for a command that was started without RUN. Does not import torch."""

import dataclasses
import os
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_demo.config import WEIGHT_DECAY, TrainConfig
from accel_demo.errors import UserError
from accel_demo.lab.course.launch_files import train_file
from accel_demo.lab.output import print_text
from accel_demo.show import table
from accel_demo.typed_json import load_object, typed
from accel_demo.wording import age

FOLDER = Path("runs")  # train files without --run-dir create a folder in it
FILES = ("config.json", "environment.json", "metrics.jsonl", "summary.json", "predictions.json")
FILES += ("characters.json",)
LONGEST_VALUE = 60  # characters of an option's value; a damaged file may contain longer ones


@dataclass(frozen=True)
class ListedRun:
    """A run in the list. `written_at` is when its files last changed, in seconds since 1970."""

    folder: Path
    result: str  # the final test accuracy, or how far the run has come
    is_finished: bool
    written_at: float
    trained_with: str  # the train file, and the options that differ from the defaults


def is_run(folder: Path) -> bool:
    """Return True if the folder contains at least one file that a training run writes."""
    return any(os.path.exists(folder / file) for file in FILES)


def print_runs(command: str, arguments: list[str], only_finished: bool = False) -> None:
    """Print a table of the runs in runs/, latest first, and the command for the latest.

    `command` was started with `arguments`, but without RUN. If `only_finished` is true, the command
    can only use finished runs. Raises `UserError` if there are arguments, or if there is no run.
    """
    if arguments:
        raise UserError(
            f"RUN is missing. To list the runs in {FOLDER}/, type `accel-demo {command}` without "
            "options."
        )
    runs = sorted(_runs(), key=lambda run: -run.written_at)
    if not runs:
        raise UserError(
            f"there is no run in {FOLDER}/. Pass the folder of a run, or train with `accelerate "
            f"launch {train_file('train')}`."
        )
    now = time.time()
    rows = [[run.folder, run.result, age(now - run.written_at), run.trained_with] for run in runs]
    print_text(table(["run", "test accuracy", "last written", "trained with"], rows) + "\n")
    usable = [run.folder for run in runs if run.is_finished or not only_finished]
    if usable:
        print_text(f"for example: accel-demo {command} {shlex.quote(str(usable[0]))}")
    else:
        print_text(f"none of them has finished, as `accel-demo {command}` requires")


def _runs() -> list[ListedRun]:
    try:
        folders = list(FOLDER.iterdir()) if FOLDER.is_dir() else []
    except OSError as error:
        raise UserError(f"{FOLDER} cannot be read ({error.strerror})") from None
    return [_listed(folder) for folder in folders if is_run(folder)]


def _listed(folder: Path) -> ListedRun:
    config, environment, summary = (
        _read(folder / f"{name}.json") for name in ("config", "environment", "summary")
    )
    is_finished = (folder / "summary.json").is_file()
    return ListedRun(
        folder,
        _accuracy(summary) if is_finished else _position(folder / "metrics.jsonl", config),
        is_finished,
        max(_written_at(folder / file) for file in FILES),
        _trained_with(config, environment),
    )


def _written_at(path: Path) -> float:
    """Return when the file was last written, in seconds since 1970, or 0 if there is no file."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _read(path: Path) -> dict[str, Any]:
    """Return the object in a file. It is empty if the file is missing or damaged."""
    try:
        return load_object(path.read_bytes())
    except (OSError, ValueError):
        return {}


def _accuracy(summary: dict[str, Any]) -> str:
    try:
        return f"{typed(float, summary['test_accuracy'], 'test_accuracy'):.4f}"
    except (KeyError, ValueError):
        return "unknown"


def _position(metrics: Path, config: dict[str, Any]) -> str:
    """Return text such as "unfinished, epoch 3 of 10". The last line may be incomplete."""
    try:
        lines = metrics.read_bytes().splitlines()
    except OSError:
        lines = []
    for line in reversed(lines):
        try:
            text = f"unfinished, epoch {typed(int, load_object(line)['epoch'], 'epoch')}"
        except (KeyError, ValueError):
            continue
        return text + (f" of {config['epochs']}" if isinstance(config.get("epochs"), int) else "")
    return "unfinished"


def _trained_with(config: dict[str, Any], environment: dict[str, Any]) -> str:
    """Return text such as "train.py --epochs 3 (2 processes, bf16)"."""
    words = [f"{environment['script']}.py"] if "script" in environment else []
    for field in dataclasses.fields(TrainConfig):
        default = field.default
        if field.name == "weight_decay":
            default = WEIGHT_DECAY.get(str(config.get("optimizer")), 0.0)
        value, flag = config.get(field.name, default), field.name.replace("_", "-")
        if value == default:
            continue
        if field.type is bool:
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", shlex.quote(str(value)[:LONGEST_VALUE])]
    launch = []
    if environment.get("processes", 1) != 1:
        launch.append(f"{environment['processes']} processes")
    if environment.get("mixed_precision", "no") != "no":
        launch.append(str(environment["mixed_precision"]))
    text = " ".join(words) + (f" ({', '.join(launch)})" if launch else "")
    return text.strip() or "unknown"
