"""Track one training run: its position, metrics and checkpoints, and whether it should stop."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from accel_demo.config import TrainConfig
from accel_demo.data import ImageSet
from accel_demo.processes.connect import is_main_process
from accel_demo.processes.signals import StopSignals
from accel_demo.run.checkpoint import Checkpoints, agreement
from accel_demo.run.folder import write_launch
from accel_demo.run.log import TrainLog
from accel_demo.run.progress import Progress
from accel_demo.run.resume import Start, check_folder, delete_later_results, find_start, make_folder
from accel_demo.run.shared_folder import lock_folder, raised_everywhere, shared_folder


def open_run(
    config: TrainConfig,
    environment: dict,
    stop_signals: StopSignals,
    device: torch.device,
    batches_per_epoch: int,
) -> "Run":
    """Claim the run's folder, and return the run at the position that `--resume` selects.

    All processes agree on the folder and the position. Then the main process locks the folder,
    writes config.json and environment.json, deletes results that are newer than the position, and
    prints which run this is. Every process must call this.

    `environment` comes from `describe_run`. `batches_per_epoch` is the number of micro-batches per
    epoch on this process. If any process cannot use the folder or the checkpoint, every process
    raises `UserError` before a result is written or deleted.
    """
    folder = shared_folder(lambda: make_folder(config, environment))
    with raised_everywhere():  # no process writes before all others have read
        check_folder(folder, config, environment)
        start = find_start(folder, config, environment, batches_per_epoch)
    checkpoints = Checkpoints(folder, config, environment, start)
    progress = Progress(config, batches_per_epoch, start.epoch, start.batches, start.step)
    log = TrainLog(folder, config, environment["processes"], start.step, start.log)
    run = Run(config, stop_signals, device, checkpoints, progress, log)
    with agreement(checkpoints.unfinished):
        if is_main_process():
            lock_folder(folder, owner=run)
            write_launch(folder, config, environment, start.as_json())
            delete_later_results(folder, start)
            for line in start.remarks:
                print(line, flush=True)
    return run


@dataclass(frozen=True)
class StepDecision:
    """What follows an optimizer step. It is the same in every process."""

    must_log: bool
    must_save: bool


class Run:
    """Everything that a train file does besides the training itself.

    Every process calls the same methods in the same order. Inside `Run`, the processes communicate
    only to load and save checkpoints, and to stop after the same step. The train files themselves
    reduce and gather the metrics.
    """

    def __init__(
        self,
        config: TrainConfig,
        stop_signals: StopSignals,
        device: torch.device,
        checkpoints: Checkpoints,
        progress: Progress,
        log: TrainLog,
    ):
        self.config, self.stop_signals, self.device = config, stop_signals, device
        self.checkpoints, self.progress, self.log = checkpoints, progress, log
        self.folder = checkpoints.folder
        self.learning_rate = 0.0  # of the last step
        self.is_stopping = False  # set by `finish_step`, in all processes after the same step

    @property
    def start(self) -> Start:
        """The position at which this launch began."""
        return self.checkpoints.start

    def load_checkpoint(
        self,
        load_state: Callable[..., object],
        model: torch.nn.Module,
        scheduler,
        train_set: ImageSet,
    ) -> None:
        """Call `load_state` with the checkpoint folder. Do nothing if this is a new run.

        `scheduler` may be wrapped by Accelerate. A DDP model first runs a forward and a backward
        pass on one batch of `train_set`, because DDP sums gradients in a different order after its
        first step.
        """
        scheduler = getattr(scheduler, "scheduler", scheduler)
        self.checkpoints.load(load_state, model, scheduler, train_set, self.device)

    def epochs(self) -> Iterator[int]:
        """Yield the index of each remaining epoch.

        After a resume with a different number of processes, an epoch may have no batches left. It
        still needs its evaluation.
        """
        for epoch in range(self.progress.epoch, self.config.epochs):
            if self.progress.is_complete and not self.progress.ends_epoch:
                return
            yield epoch

    @property
    def batches_done(self) -> int:
        """The number of batches to skip in this epoch, because they were finished before a resume.

        Read this before the first batch, because each batch increases it.
        """
        return self.progress.batches

    @property
    def ends_window(self) -> bool:
        """True on the last micro-batch of an optimizer step."""
        return self.progress.ends_window

    @property
    def window_scale(self) -> float:
        """The factor for the loss: above 1 in a step with fewer than `accumulate` micro-batches."""
        return self.progress.window_scale

    def batches(self, loader: Iterable) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the batches from `loader`. Stop early if the run is complete or is stopping."""
        progress = self.progress
        self.log.start_epoch(progress)
        for batch in loader:
            progress.batches += 1
            yield batch
            self.log.count_batch()
            if progress.is_complete or self.is_stopping:
                return

    def finish_step(self, learning_rate: float | torch.Tensor) -> StepDecision:
        """Count an optimizer step. Return whether to log and to save a checkpoint after it.

        If a signal asks the run to stop after this step, `is_stopping` is true from here on.
        """
        progress, config = self.progress, self.config
        progress.step += 1
        self.learning_rate = float(learning_rate)
        # After an evaluation, the train file saves a checkpoint anyway.
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

    def end_epoch(self, test_totals: torch.Tensor) -> None:
        """Log the test metrics from totals over the whole test set, and advance to the next epoch.

        Call `save` next. If the run is killed before that, it resumes from an earlier checkpoint.
        """
        self.log.end_epoch(self.progress.step, test_totals)
        self.progress.next_epoch()

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
