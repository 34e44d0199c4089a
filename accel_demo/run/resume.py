"""Find the checkpoint from which `--resume` continues, and check that it belongs to this run."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from accel_demo.config import TrainConfig
from accel_demo.errors import UserError
from accel_demo.run.manifest import Damaged, checkpoints_of, newest_complete, position, verify
from accel_demo.wording import counted


@dataclass(frozen=True)
class Start:
    """The position from which a run starts.

    `folder` is the checkpoint, or None for a new run. `epoch` and `step` count the finished epochs
    and optimizer steps. `batches` counts the micro-batches that each process has finished in the
    current epoch. If a different number of processes saved the checkpoint, `batches` and `step` are
    converted: see `next_step_after`.
    """

    folder: Path | None = None
    epoch: int = 0
    batches: int = 0
    step: int = 0
    log: dict = field(default_factory=dict)  # `TrainLog.state()` from the checkpoint
    random_states: tuple[str, ...] = ()  # one digest per rank
    other_world: bool = False  # True if a different number of processes saved it
    remarks: tuple[str, ...] = ()

    def as_json(self) -> dict:
        """Return the position for environment.json. `checkpoint` is None for a new run."""
        folder = None if self.folder is None else str(self.folder)
        position = {"epoch": self.epoch, "batches": self.batches, "step": self.step}
        return {"checkpoint": folder, **position}


def find_start(run: Path, config: TrainConfig, environment: dict, batches_per_epoch: int) -> Start:
    """Return the position that `--resume` selects. Every process finds the same position.

    `auto` selects the newest complete checkpoint in the folder `run`. If there is no checkpoint,
    the run starts from the beginning.

    Raises `UserError` if `--resume` is not a complete checkpoint of this run, if
    continuing would overwrite newer checkpoints or mix two runs.
    """
    if not config.resume:
        return Start()
    folder, remarks = Path(config.resume), []
    if config.resume == "auto":
        folder, remarks = newest_complete(run)
        if folder is None and remarks:
            raise UserError(
                f"{remarks[0]}, and there is no complete checkpoint. Delete {run} to start again."
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
    other_world = saved["processes"] != processes
    remarks.append(f"resumed from {folder}, after step {step}")
    if other_world:
        used = batches * saved["processes"]  # batches of this epoch, on all processes together
        batches = next_step_after(used, processes, config.accumulate, batches_per_epoch)
        # Count the steps that this number of processes would have taken up to this position.
        step = epoch * config.steps_per_epoch(batches_per_epoch) + config.steps_per_epoch(batches)
        remarks.append(
            f"saved with {counted(saved['processes'], 'process')}, resuming with {processes}: each "
            "image is used at most once per epoch, but results are no longer bitwise identical"
        )
        if left_out := max(0, batches * processes - used) * config.batch_size:
            step_size = processes * config.batch_size * config.accumulate
            remarks.append(
                f"this leaves out {counted(left_out, 'image')} of epoch {epoch + 1}, because "
                f"a step now uses {counted(step_size, 'image')}"
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
        other_world,
        tuple(remarks),
    )


def next_step_after(used: int, processes: int, accumulate: int, batches_per_epoch: int) -> int:
    """Return the first position at which a step of `processes` processes uses only new batches.

    The order of the batches in an epoch does not depend on the number of processes, and batch k is
    used by process `k % processes`. If the first `used` batches of the epoch have been used, the
    next step starts at the first multiple of `processes * accumulate` batches that is not below
    `used`. The batches in between are left out. The result counts batches per process, and is
    `batches_per_epoch` if no whole step is left.
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
            f"{run} contains newer checkpoints than {folder.name}, such as {newer[0].name}. Delete "
            "them, or choose an empty --run-dir."
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
