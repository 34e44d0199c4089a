"""What `--resume` means: the run's folder, the position to start from, what to keep or delete."""

import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from accel_demo.config import TrainConfig
from accel_demo.errors import UserError
from accel_demo.files import rename
from accel_demo.processes.environment import nodes_may_change
from accel_demo.run.folder import damaged_file, load_config, read_json
from accel_demo.run.manifest import (
    MANIFEST,
    UNREADABLE,
    Damaged,
    checkpoints_of,
    discard,
    ignored_files,
    newest_complete,
    position,
    verify,
)
from accel_demo.wording import counted, listed


@dataclass(frozen=True)
class Start:
    """The position from which a run starts.

    `folder` is the checkpoint, or None for a new run. `epoch` and `step` count the finished epochs
    and optimizer steps (see `Progress`). `batches` counts the micro-batches that each process has
    finished in the current epoch. If a different number of processes saved the checkpoint,
    `batches` and `step` are converted: see `find_start`.
    """

    folder: Path | None = None
    epoch: int = 0
    batches: int = 0
    step: int = 0
    log: dict = field(default_factory=dict)  # `TrainLog.state()` from the checkpoint
    random_states: tuple[str, ...] = ()  # one digest per rank
    processes_changed: bool = False  # True if a different number of processes saved it
    remarks: tuple[str, ...] = ()

    def as_json(self) -> dict:
        """Return the position for start.json. `checkpoint` is None for a new run."""
        checkpoint = None if self.folder is None else str(self.folder)
        finished = {"epoch": self.epoch, "batches": self.batches, "step": self.step}
        return {"checkpoint": checkpoint, **finished}


def make_folder(config: TrainConfig, environment: dict) -> tuple[Path, bool]:
    """Create the folder of this run, if necessary. Return it, and whether it is new.

    See `folder_of` for which folder this is. Raises `UserError` if it is not writable, if
    `--resume` is not a checkpoint, or if a launch that can change its number of processes has
    neither a `--run-dir` nor a checkpoint to resume from.
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
        # A launch killed in `keep_finished` may leave a link to a folder that no longer exists.
        Path(os.path.realpath(folder)).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(
            f"cannot write to {folder} ({error.strerror}). Choose a different --run-dir."
        ) from None
    return folder, is_new


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


def check_folder(folder: Path, config: TrainConfig, environment: dict) -> None:
    """Raise `UserError` if this run may not use the folder.

    A folder contains one run: one config, train file, number of processes and precision. A run can
    be resumed in its folder, even with a different number of processes. A run that has no
    checkpoint yet can also be started again, and so can a finished run: see `keep_finished`.
    """
    if (folder / "config.json").exists():
        wanted = config.fixed_choices() | _launch(environment)
        held = load_config(folder).fixed_choices() | read_json(folder / "environment.json")
        if "script" not in held:
            raise damaged_file(folder / "environment.json")
        if config.resume:  # a run may continue with a different number of processes
            del wanted["processes"]
        for name, value in wanted.items():
            if held.get(name) != value:
                raise UserError(
                    f"{folder} contains a run with {name} {held.get(name)}, not {value}. "
                    "Choose a different --run-dir."
                )
        if checkpoints_of(folder) and not is_finished(folder) and not config.resume:
            raise UserError(
                f"{folder} contains an unfinished run. Continue it with --resume auto, or choose a "
                "different --run-dir to start again."
            )


def find_start(run: Path, config: TrainConfig, environment: dict, batches_per_epoch: int) -> Start:
    """Return the position that `--resume` selects.

    `auto` selects the newest complete checkpoint in the folder `run`. If there is no checkpoint,
    the run starts from the beginning. Every process reads the same folder, and so finds the same
    position.

    Raises `UserError` if all checkpoints are damaged, if `--resume` is not a complete checkpoint of
    this run, or if continuing from it would overwrite newer checkpoints or mix two runs.
    """
    if not config.resume:
        return Start()
    folder, remarks = Path(config.resume), []
    if config.resume == "auto":
        folder, remarks = newest_complete(run)
        if folder is None and remarks:
            raise UserError(
                f"{remarks[0]}, and there is no complete checkpoint. Choose a different --run-dir "
                "to start again."
            )
        if folder is None:
            remark = f"there is no checkpoint in {run} yet: training starts from the beginning"
            return Start(remarks=(remark,))
    else:
        _check_nothing_is_lost(folder, run)
    try:
        manifest = verify(folder)
    except Damaged as reason:
        raise UserError(
            f"{folder} is not a complete checkpoint ({reason}). Choose a different one, or use "
            "--resume auto."
        ) from None
    saved, processes = manifest["environment"], environment["processes"]
    _check_same_run(folder, manifest["config"] | saved, config, environment)
    epoch, batches, step = manifest["epoch"], manifest["batches"], manifest["step"]
    processes_changed = saved["processes"] != processes
    remarks.append(f"resumed from {folder}, after step {step}")
    if ignored := [repr(name)[1:-1] for name in ignored_files(folder, manifest)]:
        remarks.append(
            f"ignored in this checkpoint, because loading does not read it: {listed(ignored)}"
        )
    if processes_changed:
        used = batches * saved["processes"]  # batches of this epoch, on all processes together
        batches = next_step_after(used, processes, config.accumulate, batches_per_epoch)
        # Count the steps that this number of processes would have taken up to this position.
        step = epoch * config.steps_per_epoch(batches_per_epoch) + config.steps_per_epoch(batches)
        remarks.append(
            f"saved with {counted(saved['processes'], 'process')}, resuming with {processes}: each "
            f"{config.sample} is used at most once per epoch, but results are no longer bitwise "
            "identical"
        )
        if left_out := max(0, batches * processes - used) * config.batch_size:
            step_size = processes * config.batch_size * config.accumulate
            remarks.append(
                f"this leaves out {counted(left_out, config.sample)} of epoch {epoch + 1}, because "
                f"a step now uses {counted(step_size, config.sample)}"
            )
    total_steps = config.total_steps(batches_per_epoch)
    if step >= total_steps:  # the run is complete, except for an evaluation inside an epoch
        step = total_steps
        epoch, batches = (epoch, batches_per_epoch) if batches else (config.epochs, 0)
    for name in ("torch", "accelerate", "threads_per_process"):
        if saved[name] != environment[name]:
            remarks.append(
                f"saved with {name} {saved[name]}, resuming with {environment[name]}: results may "
                "no longer be bitwise identical"
            )
    return Start(
        folder,
        epoch,
        batches,
        step,
        manifest["log"],
        tuple(manifest["random_states"]),
        processes_changed,
        tuple(remarks),
    )


def is_finished(folder: Path) -> bool:
    return (folder / "summary.json").exists()


def keep_finished(folder: Path) -> Path:
    """Rename the folder of a finished run, create an empty one instead, and return the new name.

    `runs/train` becomes `runs/train.1`, the next finished run there `runs/train.2`, and so on: the
    highest number is the latest run. If `folder` is a symbolic link, its target is renamed. Only
    the process that holds the lock may call this.

    If the process is killed between the two steps, the next launch creates the empty folder.
    Raises `UserError` if the folder cannot be renamed.
    """
    path = Path(os.path.realpath(folder))
    try:
        pattern = re.compile(re.escape(path.name) + r"\.([0-9]+)")
        matches = map(pattern.fullmatch, os.listdir(path.parent))
        number = max((int(match[1]) for match in matches if match), default=0) + 1
        new = path.with_name(f"{path.name}.{number}")
        rename(path, new)
    except OSError as error:
        raise UserError(
            f"{folder} contains a finished run and cannot be renamed ({error.strerror}). Choose a "
            "different --run-dir."
        ) from None
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        reason = f"{error.strerror}; the finished run is now {new}"
        raise UserError(f"cannot create {folder} ({reason}). Start again.") from None
    is_same_name = folder.name == path.name and not folder.is_symlink()
    return folder.with_name(new.name) if is_same_name else new


def check_not_inside(folder: Path) -> None:
    """Raise `UserError` if the working directory is in the folder of a finished run.

    The working directory would be renamed, too. Then relative paths would no longer lead to
    `folder`, and the terminal of the user would be in the folder of the old run without saying so.
    """
    if Path.cwd().resolve().is_relative_to(folder.resolve()):
        raise UserError(
            f"{folder} contains a finished run and cannot be renamed, because it contains the "
            "working directory. Change to a different directory, or choose a different --run-dir."
        )


def delete_later_results(run: Path, start: Start) -> None:
    """Delete the final results, and all metrics and checkpoints from after the start position."""
    metrics = run / "metrics.jsonl"
    for name in ("summary.json", "model.safetensors", "predictions.json", "characters.json"):
        (run / name).unlink(missing_ok=True)
    reached = position(start.folder) if start.folder else (-1.0, 0.0)
    for path in checkpoints_of(run):
        if reached < position(path) < UNREADABLE:  # keep folders with unreadable manifests
            discard(path)
    if start.folder is None:
        metrics.unlink(missing_ok=True)
        shutil.rmtree(run / "tensorboard", ignore_errors=True)
    elif metrics.exists():
        os.truncate(metrics, min(metrics.stat().st_size, start.log["metrics_bytes"]))


def next_step_after(used: int, processes: int, accumulate: int, batches_per_epoch: int) -> int:
    """Return the first position at which a step of `processes` processes uses only new batches.

    The order of the batches in an epoch does not depend on the number of processes, and batch k is
    used by process `k % processes`. If the first `used` batches of the epoch have been used, the
    next step starts at the first multiple of `processes * accumulate` batches that is not below
    `used`. The batches in between are left out. The result counts batches per process, and is
    `batches_per_epoch` if no batch is left.
    """
    steps = math.ceil(used / (processes * accumulate))
    return min(steps * accumulate, batches_per_epoch)


def _check_nothing_is_lost(folder: Path, run: Path) -> None:
    """Raise `UserError` if resuming from `folder` would overwrite other results in `run`."""
    known = checkpoints_of(run)
    if folder.resolve() not in [path.resolve() for path in known]:
        if known or (run / "metrics.jsonl").exists():
            raise UserError(f"{run} already contains a different run. Choose an empty --run-dir.")
    elif newer := [path for path in known if position(path) > position(folder)]:
        raise UserError(
            f"{run} contains newer checkpoints than {folder.name}, such as {newer[0].name}. Choose "
            "an empty --run-dir, or move them to a different folder."
        )


def _check_same_run(folder: Path, held: dict, config: TrainConfig, environment: dict) -> None:
    wanted = config.fixed_choices()
    wanted |= {name: environment[name] for name in ("script", "mixed_precision", "device")}
    for name, value in wanted.items():
        if held.get(name) != value:
            raise UserError(
                f"{folder} belongs to a run with {name} {held.get(name)}, not {value}. Resume it "
                "with the same options."
            )


def _launch(environment: dict) -> dict:
    """Return the part of the environment that identifies a run."""
    return {name: environment[name] for name in ("script", "processes", "mixed_precision")}
