"""Find the checkpoint from which `--resume` continues, and check that it belongs to this run."""

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
    current epoch.
    """

    folder: Path | None = None
    epoch: int = 0
    batches: int = 0
    step: int = 0
    log: dict = field(default_factory=dict)  # `TrainLog.state()` from the checkpoint
    random_states: tuple[str, ...] = ()  # one digest per rank
    other_world: bool = False  # True if a different number of processes saved it
    remarks: tuple[str, ...] = ()


def find_start(run: Path, config: TrainConfig, environment: dict, batches_per_epoch: int) -> Start:
    """Return the position that `--resume` selects. Every process finds the same position.

    `auto` selects the newest complete checkpoint in the folder `run`. If there is no checkpoint,
    the run starts from the beginning.

    Raises `UserError` if `--resume` is not a complete checkpoint of this run, if
    continuing would overwrite newer checkpoints or mix two runs, or if a different number of
    processes saved the checkpoint in the middle of an epoch.
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
    epoch, step = manifest["epoch"], manifest["step"]
    other_world = saved["processes"] != processes
    remarks.append(f"resumed from {folder}, after step {step}")
    if other_world and manifest["batches"]:
        raise UserError(
            f"{folder} was saved inside an epoch with {counted(saved['processes'], 'process')}. "
            f"Resume with the same number, or from a checkpoint at the end of an epoch."
        )
    if other_world:
        # Count the steps that this number of processes would have taken in the finished epochs.
        step = epoch * config.steps_per_epoch(batches_per_epoch)
        remarks.append(
            f"saved with {counted(saved['processes'], 'process')}, resuming with {processes}: each "
            "image is used at most once per epoch, but results are no longer bitwise identical"
        )
    total_steps = config.total_steps(batches_per_epoch)
    if step >= total_steps:
        epoch, step = config.epochs, total_steps  # the run is already complete
    for name in ("torch", "accelerate", "threads_per_process"):
        if saved[name] != environment[name]:
            remarks.append(
                f"saved with {name} {saved[name]}, resuming with {environment[name]}: results may "
                "no longer be bitwise identical"
            )
    return Start(
        folder,
        epoch,
        manifest["batches"],
        step,
        manifest["log"],
        tuple(manifest["random_states"]),
        other_world,
        tuple(remarks),
    )


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
