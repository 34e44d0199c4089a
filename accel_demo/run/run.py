"""Track one training run: its position, metrics and checkpoints, and whether it should stop."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from accel_demo.config import TrainConfig
from accel_demo.data import ImageSet
from accel_demo.processes.connect import describe_run
from accel_demo.processes.signals import StopSignals
from accel_demo.run.checkpoint import Checkpoints
from accel_demo.run.log import TrainLog
from accel_demo.run.progress import Progress
from accel_demo.workarounds import keep_freed_memory


class Run:
    """Everything that a train file does besides the training itself.

    Every process creates a `Run` and calls the same methods in the same order. Inside `Run`, the
    processes communicate only to start, to save and load checkpoints, and to stop after the same
    step. The train files themselves reduce and gather the metrics.
    """

    def __init__(
        self,
        version: str,
        config: TrainConfig,
        stop_signals: StopSignals,
        device: torch.device,
        mixed_precision: str,
        batches_per_epoch: int,
    ):
        """Claim the run's folder and find the position from which the run starts.

        From here on, the process does not return freed memory to the system: see
        `keep_freed_memory`.

        `version` is the name of the train file, without ".py". `batches_per_epoch` is the number of
        micro-batches per epoch on this process. If the folder named by `--run-dir` or `--resume`
        cannot be used by all processes, each raises `UserError` before anything is written.
        """
        keep_freed_memory()
        self.config, self.device, self.stop_signals = config, device, stop_signals
        environment = describe_run(version, device, mixed_precision)
        self.checkpoints = Checkpoints(config, environment, batches_per_epoch)
        self.folder, start = self.checkpoints.folder, self.checkpoints.start
        self.progress = Progress(config, batches_per_epoch, start.epoch, start.batches, start.step)
        self.log = TrainLog(self.folder, config, environment["processes"], start.step, start.log)
        self.totals = torch.zeros(3, device=device)  # summed since the last `log_interval`
        self.learning_rate = 0.0  # of the last step
        self.must_log = self.must_save = self.is_stopping = False

    def resume(
        self,
        load_state: Callable[..., object],
        model: torch.nn.Module,
        scheduler,
        train_set: ImageSet,
    ) -> None:
        """Call `load_state` with the checkpoint folder, if the run continues from a checkpoint.

        `scheduler` may be wrapped by Accelerate. A DDP model first runs a forward and a backward
        pass on one batch of `train_set`, because DDP sums gradients in a different order after its
        first step.
        """
        scheduler = getattr(scheduler, "scheduler", scheduler)
        self.checkpoints.load(load_state, model, scheduler, train_set, self.device)

    def epochs(self) -> Iterator[int]:
        """Yield the index of each remaining epoch. `end_epoch` advances to the next epoch.

        After a resume with a different number of processes, an epoch may have no batches left. It
        still needs its evaluation.
        """
        while not self.progress.is_complete or self.progress.ends_epoch:
            yield self.progress.epoch

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
            if progress.is_complete or self.is_stopping:
                return

    def add_totals(self, totals: torch.Tensor) -> None:
        """Add the `batch_totals` of one micro-batch, and advance the progress bar."""
        self.totals = self.totals + totals
        self.log.count_batch()

    def finish_step(self, learning_rate: float | torch.Tensor) -> None:
        """Count an optimizer step, and decide whether to log, save or stop after it.

        Sets `must_log`, `must_save` and `is_stopping` to the same values in every process.
        """
        progress, config = self.progress, self.config
        progress.step += 1
        self.learning_rate = float(learning_rate)
        # After an evaluation, the train file saves a checkpoint anyway.
        evaluation_follows = progress.ends_epoch or progress.is_complete
        self.is_stopping = not progress.is_complete and self.stop_signals.after(progress.step)
        is_due = config.checkpoint_every > 0 and progress.step % config.checkpoint_every == 0
        self.must_save = self.is_stopping or (is_due and not evaluation_follows)
        is_log_step = progress.step % config.log_every == 0
        is_print_step = config.print_every > 0 and progress.step % config.print_every == 0
        self.must_log = is_log_step or is_print_step or evaluation_follows or self.must_save

    def log_interval(self, totals: Any) -> None:
        """Log the metrics since the last call. `totals` is float32 [3], summed over processes."""
        self.log.interval(self.progress.step, self.learning_rate, totals)
        self.totals = torch.zeros_like(self.totals)

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
