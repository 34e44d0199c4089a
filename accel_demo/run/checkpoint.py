"""Write each checkpoint completely or not at all, delete old ones, and restore a run's state."""

import hashlib
import pickle
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import numpy
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.optim.lr_scheduler import LambdaLR

from accel_demo.config import TrainConfig
from accel_demo.errors import UserError
from accel_demo.files import flush, rename
from accel_demo.optimizer import set_schedule
from accel_demo.processes.connect import gather_objects, is_main_process
from accel_demo.processes.fsdp import is_sharded
from accel_demo.run.log import TrainLog
from accel_demo.run.manifest import checkpoints_of, discard, position, seal
from accel_demo.run.progress import Progress
from accel_demo.run.resume import Start

READ_ERRORS = (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError)
READ_ERRORS += (EOFError, pickle.UnpicklingError)
SHARDS = "pytorch_model_fsdp_0"  # folder with the weights in a checkpoint of FSDP
UNFINISHED = ".unfinished"  # name of a checkpoint's folder while it is being written


class Checkpoints:
    """The checkpoints of one run. `start` is the position from which the run starts."""

    def __init__(self, folder: Path, config: TrainConfig, environment: dict, start: Start):
        self.folder, self.config, self.environment = folder, config, environment
        self.start = start

    def load(
        self, load_state: Callable[..., object], model: torch.nn.Module, scheduler: LambdaLR
    ) -> None:
        """Call `load_state` with the checkpoint folder, if the run starts from a checkpoint.

        If a different number of processes saved the checkpoint, set the schedule to `start.step`.
        Otherwise, compare digests of the loaded random states with the digests in the manifest,
        because `accelerator.load_state` silently skips random states that it cannot read.

        Raises `UserError` if the checkpoint cannot be loaded.
        """
        folder = self.start.folder
        if folder is None:
            return
        if is_sharded(model) != (folder / SHARDS).exists():
            state = "with" if (folder / SHARDS).exists() else "without"
            raise UserError(
                f"{folder} was saved {state} FSDP. Resume it with the launch config that saved it."
            )
        try:
            load_state(folder)
        except (*READ_ERRORS, SafetensorError, *_errors_of_fsdp()) as error:
            raise UserError(
                f"{folder} cannot be loaded ({_first_line(error)}). Resume from another checkpoint."
            ) from None
        rank = dist.get_rank() if dist.is_initialized() else 0
        if self.start.processes_changed:
            set_schedule(scheduler, self.start.step)
        elif random_states_digest() != self.start.random_states[rank]:
            raise UserError(
                f"{folder} contains random states that cannot be read here. Resume with the "
                "package versions and the number of GPUs that saved it."
            )

    def save(self, save_state: Callable[..., object], progress: Progress, log: TrainLog) -> None:
        """Call `save_state` with a new folder, and turn the folder into a checkpoint.

        Every process must call this. The folder has a temporary name until all files are on disk,
        so that no run resumes from an incomplete checkpoint. If any process cannot write, every
        process raises `UserError`.
        """
        unfinished = self.folder / "checkpoints" / UNFINISHED
        with _written_everywhere(unfinished):
            if is_main_process():
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir(parents=True)
                flush(self.folder)
                flush(self.folder.parent)
                if (self.folder / "metrics.jsonl").exists():
                    flush(self.folder / "metrics.jsonl")
        with _written_everywhere(unfinished):
            save_state(unfinished)
        random_states = gather_objects(random_states_digest())
        with _written_everywhere(unfinished):
            if is_main_process():
                facts = {
                    "epoch": progress.epoch,
                    "batches": progress.batches,
                    "step": progress.step,
                    "log": log.state(),
                    "random_states": random_states,
                    "config": self.config.fixed_choices(),
                    "environment": self.environment,
                }
                seal(unfinished, facts)
                name = f"epoch-{progress.epoch:04}-batch-{progress.batches:06}"
                self._publish(unfinished, name)

    def _publish(self, unfinished: Path, name: str) -> None:
        """Give the checkpoint its name, and delete all but the newest `--keep-last` checkpoints.

        Folders with unreadable manifests are kept, because their position is not known. Only a
        folder with the name of this checkpoint is replaced.
        """
        folder, place = unfinished.with_name(name), position(unfinished)
        if folder.exists() and position(folder) < place:  # saved with fewer processes
            folder = folder.with_name(f"{name}-{self.environment['processes']}-processes")
        if folder.exists():
            discard(folder)
        rename(unfinished, folder)
        others = [path for path in checkpoints_of(self.folder) if path != folder]
        older = [path for path in others if position(path) < place]
        for path in older[self.config.keep_last - 1 :]:
            discard(path)


def random_states_digest() -> str:
    """Return a digest of this process's random states: Python, NumPy, torch and all CUDA GPUs."""
    name, keys, *rest = cast(tuple, numpy.random.get_state())
    states = [random.getstate(), name, keys.tolist(), rest, torch.get_rng_state().tolist()]
    if torch.cuda.is_available():
        states.append([state.tolist() for state in torch.cuda.get_rng_state_all()])
    return hashlib.sha256(repr(states).encode()).hexdigest()


@contextmanager
def _written_everywhere(folder: Path) -> Iterator[None]:
    """If any process fails to write in the block, delete `folder` and raise `UserError` in all."""
    problem = None
    try:
        yield
    except UserError as error:
        problem = str(error)
    except (OSError, RuntimeError, SafetensorError, *_errors_of_fsdp()) as error:
        problem = (
            f"cannot write to {folder.parent} ({_why(error, folder)}). Fix this, then continue "
            "with --resume auto."
        )
    for sentence in filter(None, gather_objects(problem)):
        shutil.rmtree(folder, ignore_errors=True)
        raise UserError(sentence)


def _why(error: BaseException, folder: Path) -> str:
    """Return why a write failed. torch and safetensors hide the reason, so we try another write."""
    if not isinstance(error, OSError):
        try:
            (folder / "probe").write_bytes(bytes(2**16))
        except OSError as system_error:
            error = system_error
    strerror = getattr(error, "strerror", None)
    return strerror or _first_line(error) or type(error).__name__


def _errors_of_fsdp() -> tuple[type[BaseException], ...]:
    """Return what saving and loading shards may raise. Only FSDP imports this slow module."""
    module = sys.modules.get("torch.distributed.checkpoint.api")
    return (module.CheckpointException,) if module else ()


def _first_line(error: BaseException) -> str:
    for cause, _ in getattr(error, "failures", {}).values():  # of a `CheckpointException`, by rank
        error = cause
    return str(error).strip().split("\n")[0] or type(error).__name__
