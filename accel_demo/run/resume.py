"""Where a run begins: what `--resume` names, if it may go on from there."""

from dataclasses import dataclass, field
from pathlib import Path

from accel_demo.config import TrainConfig
from accel_demo.errors import UserError
from accel_demo.run.manifest import Damaged, checkpoints_of, newest_whole, position, verify


@dataclass(frozen=True)
class Start:
    """Where a run begins: at the checkpoint in `folder`, or, without one, at the very beginning.

    `epoch` epochs are done, `batches` batches per process of the next, and `step` optimizer steps.
    """

    folder: Path | None = None
    epoch: int = 0
    batches: int = 0
    step: int = 0
    log: dict = field(default_factory=dict)  # what `TrainLog.state` gave
    random_states: tuple[str, ...] = ()  # a digest for each rank
    other_world: bool = False  # saved by another number of processes
    remarks: tuple[str, ...] = ()


def find_start(run: Path, config: TrainConfig, environment: dict, batches_per_epoch: int) -> Start:
    """Where `--resume` says that a run begins. Every process finds the same.

    `auto` is the newest whole checkpoint in the folder `run`, or the very beginning where there is
    none at all. Raises `UserError` for a folder that is no whole checkpoint of this run, where
    going on from it would drop newer ones or mix two runs, and inside an epoch for one that another
    number of processes saved.
    """
    if not config.resume:
        return Start()
    folder, remarks = Path(config.resume), []
    if config.resume == "auto":
        folder, remarks = newest_whole(run)
        if folder is None and remarks:
            raise UserError(f"{remarks[0]}, and no other is whole: delete {run} to start over")
        if folder is None:
            remark = f"there is no checkpoint in {run} yet: the training starts at the beginning"
            return Start(remarks=(remark,))
    else:
        _check_nothing_is_lost(folder, run)
    try:
        manifest = verify(folder)
    except Damaged as reason:
        raise UserError(
            f"{folder} is no whole checkpoint ({reason}): name another, or --resume auto"
        ) from None
    saved, processes = manifest["environment"], environment["processes"]
    _check_same_run(folder, manifest["config"] | saved, config, environment)
    epoch, step = manifest["epoch"], manifest["step"]
    other_world = saved["processes"] != processes
    remarks.append(f"resumed from {folder}, after step {step}")
    if other_world and manifest["batches"]:
        raise UserError(
            f"{folder} was saved inside an epoch with processes={saved['processes']}, and this is "
            f"{processes}: start as many, or resume from a checkpoint at an epoch's end"
        )
    if other_world:
        # The step at which this number of processes would be.
        step = epoch * config.steps_per_epoch(batches_per_epoch)
        remarks.append(
            f"it was saved with processes={saved['processes']}, and this is {processes}: every "
            "image is still seen once an epoch, but the bits differ from here on"
        )
    total_steps = config.total_steps(batches_per_epoch)
    if step >= total_steps:
        epoch, step = config.epochs, total_steps  # nothing is left but to finish
    for name in ("torch", "accelerate", "threads_per_process"):
        if saved[name] != environment[name]:
            remarks.append(
                f"it was saved with {name} {saved[name]}, and this is {environment[name]}: the "
                "bits may differ from here on"
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
    """Raise `UserError` where going on from `folder` in the folder `run` would overwrite others."""
    known = checkpoints_of(run)
    if folder.resolve() not in [path.resolve() for path in known]:
        if known or (run / "metrics.jsonl").exists():
            raise UserError(f"{run} holds another run already: choose an empty --run-dir")
    elif newer := [path for path in known if position(path) > position(folder)]:
        raise UserError(
            f"{run} holds checkpoints newer than {folder.name}, like {newer[0].name}: delete them, "
            "or choose an empty --run-dir"
        )


def _check_same_run(folder: Path, held: dict, config: TrainConfig, environment: dict) -> None:
    wanted = config.fixed_choices()
    wanted |= {name: environment[name] for name in ("telling", "mixed_precision", "device")}
    for name, value in wanted.items():
        if held.get(name) != value:
            raise UserError(
                f"{folder} is of a run with {name} {held.get(name)}, not {value}: resume that run"
            )
