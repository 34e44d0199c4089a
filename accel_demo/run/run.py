"""Track one training run: its position, metrics and checkpoints, and whether it must stop."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from accel_demo.config import TrainConfig
from accel_demo.data import ImageSet
from accel_demo.errors import output_may_be_closed
from accel_demo.processes.connect import gather_objects, is_main_process
from accel_demo.processes.signals import StopSignals
from accel_demo.run.checkpoint import Checkpoints
from accel_demo.run.folder import write_launch, writing
from accel_demo.run.log import TrainLog
from accel_demo.run.progress import Progress
from accel_demo.run.resume import (
    Start,
    check_folder,
    check_not_inside,
    delete_later_results,
    find_start,
    is_finished,
    keep_finished,
    make_folder,
)
from accel_demo.run.shared_folder import (
    RENAME_TIMEOUT,
    FolderLock,
    lock_folder,
    raised_everywhere,
    shared_folder,
)
from accel_demo.terminal import display
from accel_demo.text import TextSet


def claim_run(
    config: TrainConfig,
    environment: dict,
    stop_signals: StopSignals,
    device: torch.device,
    batches_per_epoch: int,
) -> "Run":
    """Lock the run's folder, and return the run at the position that `--resume` selects.

    Every process must call this. If a new run starts in the folder of a finished run, the folder of
    the finished run gets a new name: see `keep_finished`. Until `Run.begin`, nothing else in the
    folder is changed or deleted, so a refused run loses nothing.

    `environment` comes from `describe_run`. `batches_per_epoch` is the number of micro-batches per
    epoch on this process. If any process cannot use the folder or the checkpoint, or if another run
    uses the folder, every process raises `UserError`.
    """
    folder = shared_folder(lambda: make_folder(config, environment))
    with raised_everywhere(), writing(folder):
        lock = lock_folder(folder) if is_main_process() else None
    with raised_everywhere():
        check_folder(folder, config, environment)
        start = find_start(folder, config, environment, batches_per_epoch)
    is_rerun, *_ = gather_objects(start.folder is None and is_finished(folder))  # of rank 0
    if is_rerun:
        lock = _start_again(folder)
    checkpoints = Checkpoints(folder, config, environment, start)
    progress = Progress(config, batches_per_epoch, start.epoch, start.batches, start.step)
    log = TrainLog(folder, config, environment["processes"], start.step, start.log)
    return Run(config, environment, stop_signals, device, checkpoints, progress, log, lock)


def _start_again(folder: Path) -> FolderLock | None:
    """Rename the folder of a finished run, and return the lock of a new folder with its old name.

    Every process must call this. It returns only when every process sees the new folder under the
    old name, so that no process writes to the folder of the finished run.
    """
    with raised_everywhere(), writing(folder):
        check_not_inside(folder)
    lock = None

    def make_folder() -> tuple[Path, bool]:
        nonlocal lock
        with writing(folder):
            if is_main_process():
                new_name = keep_finished(folder)
                with output_may_be_closed():
                    display(f"the finished run in {folder} is now {new_name}")
                lock = lock_folder(folder)
        return folder, False

    shared_folder(make_folder, RENAME_TIMEOUT)
    return lock


@dataclass(frozen=True)
class StepDecision:
    """What follows an optimizer step. It is the same in every process."""

    must_log: bool
    must_save: bool


@dataclass(eq=False)
class Run:
    """The bookkeeping of one training run: its position, log and checkpoints, and when to stop.

    Every process calls the same methods in the same order. Inside `Run`, the processes communicate
    only to resume, to begin, to save checkpoints, and to stop after the same step. The train files
    themselves reduce and gather the metrics.
    """

    config: TrainConfig
    environment: dict
    stop_signals: StopSignals
    device: torch.device
    checkpoints: Checkpoints
    progress: Progress
    log: TrainLog
    lock: FolderLock | None
    learning_rate: float = 0.0  # of the last step
    is_stopping: bool = False  # set by `finish_step`, in all processes after the same step

    @property
    def folder(self) -> Path:
        return self.checkpoints.folder

    @property
    def start(self) -> Start:
        """The position at which this launch starts."""
        return self.checkpoints.start

    def settle_buckets(self, model: torch.nn.Module, train_set: ImageSet | TextSet) -> None:
        """Before a checkpoint is loaded, let DDP put its buckets into their final order.

        This has an effect only if the run starts from a checkpoint and `model` is a DDP model: then
        the model runs one forward and one backward pass on samples of `train_set`.

        In its first step, DDP assigns gradients to buckets in the order of the parameters. From the
        second step on, it uses the order in which the first backward pass produced the gradients.
        With three or more processes, a gradient's position in its bucket affects the order in which
        the ranks' values are added, and so the last bits of the sum. Without this pass, the first
        step of a resumed run would differ in these bits from an uninterrupted run.
        Source: `Reducer::rebuild_buckets` in torch/csrc/distributed/c10d/reducer.cpp
        """
        if self.start.folder and isinstance(model, DistributedDataParallel):
            images, _ = train_set.__getitems__(list(range(self.config.batch_size)))
            model.train()
            model(images.to(self.device)).float().sum().backward()
            model.zero_grad()

    def load_checkpoint(
        self, load_state: Callable[..., object], model: torch.nn.Module, scheduler: Any
    ) -> None:
        """Call `load_state` with the checkpoint's folder. Do nothing in a new run.

        If any process cannot load the checkpoint, every process raises `UserError`. `scheduler` may
        be wrapped by Accelerate. If the number of processes has changed, it is set to the step at
        which this run starts.
        """
        scheduler = getattr(scheduler, "scheduler", scheduler)
        with raised_everywhere():  # or this process might delete the results of a refused run
            self.checkpoints.load(load_state, model, scheduler)

    def begin(self) -> None:
        """Describe the launch in JSON files, and delete results from after the start position.

        Also print a description of the launch, and how it resumes. If the main process fails to
        write, every process raises `UserError`.
        """
        with raised_everywhere(), writing(self.folder):
            if is_main_process():
                write_launch(self.folder, self.config, self.environment, self.start.as_json())
                delete_later_results(self.folder, self.start)
                with output_may_be_closed():
                    for line in self.start.remarks:
                        display(line)

    def epochs(self) -> Iterator[int]:
        """Yield the index of each remaining epoch.

        After a resume, an epoch may have no batches left, for example if the run was stopped after
        the epoch's last step. It still needs its evaluation.
        """
        for epoch in range(self.progress.epoch, self.config.epochs):
            if self.progress.is_complete and not self.progress.ends_epoch:
                return
            yield epoch

    @property
    def batches_to_skip(self) -> int:
        """The number of batches of this epoch that each process must skip, because of a resume."""
        return self.start.batches if self.progress.epoch == self.start.epoch else 0

    @property
    def ends_window(self) -> bool:
        """True on the last micro-batch of an optimizer step."""
        return self.progress.ends_window

    @property
    def window_scale(self) -> float:
        """The factor for the loss: above 1 in a step with fewer than `accumulate` micro-batches."""
        return self.progress.window_scale

    def batches(self, loader: Iterable) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Count and yield the batches from `loader`, and show the progress.

        `ends_window` and `window_scale` describe the batch just yielded. End early on `--max-steps`
        or if the run is stopping.
        """
        progress = self.progress
        self.log.start_epoch(progress)
        for batch in loader:
            progress.batches += 1
            yield batch
            self.log.count_batch(progress)
            if progress.is_complete or self.is_stopping:
                return

    def finish_step(self, learning_rate: float | torch.Tensor) -> StepDecision:
        """Count an optimizer step. Return whether to log and to save a checkpoint after it.

        If a signal asks the run to stop after this step, and it is not the last step anyway,
        `is_stopping` is true from here on.
        """
        progress, config = self.progress, self.config
        progress.step += 1
        self.learning_rate = float(learning_rate)
        # After an evaluation, `end_epoch` saves a checkpoint anyway.
        evaluation_follows = progress.ends_epoch or progress.is_complete
        self.is_stopping = not progress.is_complete and self.stop_signals.after(progress.step)
        is_due = config.checkpoint_every > 0 and progress.step % config.checkpoint_every == 0
        must_save = self.is_stopping or (is_due and not evaluation_follows)
        is_log_step = progress.step % config.log_every == 0
        is_print_step = config.print_every > 0 and progress.step % config.print_every == 0
        must_log = is_log_step or is_print_step or evaluation_follows or must_save
        return StepDecision(must_log, must_save)

    def log_interval(self, totals: Any) -> None:
        """Log the training metrics since the last call.

        `totals` is float32 [3]: the `batch_totals` of these micro-batches, summed over all
        processes.
        """
        self.log.interval(self.progress.step, self.learning_rate, totals)

    def end_epoch(self, test_totals: torch.Tensor, save_state: Callable[..., object]) -> None:
        """Log the test metrics, advance to the next epoch, and save a checkpoint.

        `test_totals` is float32 [3]: the `batch_totals` of the whole test set.
        """
        self.log.end_epoch(self.progress.step, test_totals)
        self.progress.next_epoch()
        self.save(save_state)

    def save(self, save_state: Callable[..., object]) -> None:
        """Write a checkpoint by calling `save_state` with a folder."""
        self.checkpoints.save(save_state, self.progress, self.log)
        self.log.restart_clock()

    def finish(self) -> None:
        """Write and print the summary or, if the run was stopped, print the command to resume it.

        Call this after `save_results`, because summary.json marks the run as complete.
        """
        if self.is_stopping:
            self.log.stop(self.progress.step)
        else:
            self.log.finish(self.device)
