"""The log of a run: progress, metrics.jsonl, TensorBoard, and a summary at the end."""

import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from accel_demo.config import TrainConfig
from accel_demo.errors import output_may_be_closed, say
from accel_demo.metrics import means
from accel_demo.processes.connect import is_main_process
from accel_demo.processes.signals import resume_command
from accel_demo.progress_bar import SECONDS_BETWEEN_LINES
from accel_demo.run.folder import append_metrics, write_json
from accel_demo.run.progress import Progress
from accel_demo.terminal import display
from accel_demo.wording import counted


class TrainLog:
    """The metrics of a run. Every process computes them, but only the main process writes them.

    The images or characters per second are summed over all processes, and measured only during
    training. If the run continues from a checkpoint, `start_step` is the step from which it
    continues, and `saved` is the `state()` stored in the checkpoint.

    On a terminal, each epoch has a progress bar. If stderr is a pipe or a file, `count_batch`
    prints a line instead whenever nothing has been printed for `silence` seconds.
    """

    def __init__(
        self,
        folder: Path,
        config: TrainConfig,
        processes: int,
        start_step: int,
        saved: dict,
        silence: float = SECONDS_BETWEEN_LINES,
    ):
        self.folder, self.config, self.processes = folder, config, processes
        self.is_main_process = is_main_process()
        # A signal may end the launcher, so find out now how it was started.
        self.resume_command = resume_command(folder) if self.is_main_process else ""
        self.epoch, self.name = 0, ""  # of the current epoch, counted from 1
        self.interval_started_at = 0.0
        self.bar: Any = None  # the progress bar of the current epoch
        self.latest = ""  # the metrics of the last interval, in words
        self.silence, self.printed_at = silence, time.monotonic()
        self.writer = None
        self.start_step = start_step
        self.unit = config.counted_unit  # "image" or "character"
        self.images = saved.get("images", 0.0)  # images or characters processed in `seconds`
        self.seconds = saved.get("seconds", 0.0)
        self.test_accuracy = saved.get("test_accuracy", 0.0)
        self.best_test_accuracy = saved.get("best_test_accuracy", 0.0)
        self.epoch_totals = torch.tensor(saved.get("epoch_totals", [0.0, 0.0, 0.0]))
        self.unprinted_totals = torch.tensor(saved.get("unprinted_totals", [0.0, 0.0, 0.0]))

    def state(self) -> dict:
        """Return the state of the log, to be saved in a checkpoint as JSON."""
        metrics = self.folder / "metrics.jsonl"
        return {
            "images": self.images,
            "seconds": self.seconds,
            "test_accuracy": self.test_accuracy,
            "best_test_accuracy": self.best_test_accuracy,
            "epoch_totals": self.epoch_totals.tolist(),
            "unprinted_totals": self.unprinted_totals.tolist(),
            "metrics_bytes": metrics.stat().st_size if metrics.exists() else 0,
        }

    def start_epoch(self, progress: Progress) -> None:
        """Start the clock and the progress bar of the current epoch."""
        self.epoch = progress.epoch + 1
        self.name = f"epoch {self.epoch}/{self.config.epochs}"
        if not progress.batches:
            self.epoch_totals = torch.zeros(3)
        with output_may_be_closed():
            self.bar = tqdm(
                total=progress.batches_per_epoch,
                initial=progress.batches,
                desc=self.name,
                unit="batch",
                leave=False,
                disable=None if self.is_main_process else True,  # None: only on a terminal
            )
        if self.writer is None and self.config.track == "tensorboard" and self.is_main_process:
            from torch.utils.tensorboard import SummaryWriter

            # TensorBoard discards old values from `purge_step` on: this run logs new ones.
            folder, step = self.folder / "tensorboard", self.start_step + 1
            self.writer = SummaryWriter(folder, purge_step=step)
        self.restart_clock()

    def count_batch(self, progress: Progress) -> None:
        """Advance the progress bar by one micro-batch, or print a line after a long silence."""
        with output_may_be_closed():
            self.bar.update()
        is_log = self.is_main_process and self.bar.disable
        if is_log and time.monotonic() >= self.printed_at + self.silence:
            batch = f"batch {progress.batches}/{progress.batches_per_epoch}"
            say(f"{self.name}: {', '.join(filter(None, [batch, self.latest]))}")
            self.printed_at = time.monotonic()

    def restart_clock(self) -> None:
        """Restart the clock, so that the next interval excludes the time before this call."""
        self.interval_started_at = time.perf_counter()

    def interval(self, step: int, learning_rate: float, totals: torch.Tensor) -> None:
        """Log the training metrics since the last call. `totals` is summed over all processes.

        This waits for the device, so the training loop does not call it after every step.
        """
        totals, now = totals.cpu(), time.perf_counter()
        seconds, self.interval_started_at = now - self.interval_started_at, now
        self.epoch_totals += totals
        self.unprinted_totals += totals
        self.images += totals[2].item()
        self.seconds += seconds
        metrics = {
            "step": step,
            "epoch": self.epoch,
            "learning_rate": learning_rate,
            **means(totals, "train"),
            f"{self.unit}s_per_second": totals[2].item() / seconds,
        }
        self.latest = (
            f"loss {metrics['train_loss']:.3f}, accuracy {metrics['train_accuracy']:.3f}, "
            f"{totals[2].item() / seconds:,.0f} {self.unit}s/s"
        )
        self.bar.set_postfix_str(self.latest, refresh=False)
        self._write(metrics)
        if self.config.print_every and step % self.config.print_every == 0:
            self._print_interval(step)

    def end_epoch(self, step: int, test_totals: torch.Tensor) -> None:
        """Log the test metrics, and print the epoch's training and test metrics."""
        metrics = {"step": step, "epoch": self.epoch, **means(test_totals.cpu(), "test")}
        self.test_accuracy = metrics["test_accuracy"]
        self.best_test_accuracy = max(self.best_test_accuracy, self.test_accuracy)
        train = means(self.epoch_totals, "train")
        self._write(metrics)
        self._print(
            f"{self.name}: train loss {train['train_loss']:.4f}, "
            f"accuracy {train['train_accuracy']:.4f}; test loss {metrics['test_loss']:.4f}, "
            f"accuracy {metrics['test_accuracy']:.4f}"
        )

    def finish(self, device: torch.device) -> None:
        """Write summary.json, and print the summary in one line."""
        summary = {
            "test_accuracy": self.test_accuracy,
            "best_test_accuracy": self.best_test_accuracy,
            f"{self.unit}s_per_second": self.images / self.seconds,
            "train_seconds": self.seconds,
            "processes": self.processes,
            "device": device.type,
        }
        if device.type == "cuda":
            summary["peak_gpu_memory_bytes"] = torch.cuda.max_memory_allocated(device)
        if self.writer:
            self.writer.close()
        if self.is_main_process:
            write_json(self.folder / "summary.json", summary)
        self._print(
            f"done: test accuracy {self.test_accuracy:.4f}, "
            f"{self.images / self.seconds:,.0f} {self.unit}s/s, {self.seconds:.1f} s of training, "
            f"{counted(self.processes, 'process')} on {device.type}; saved in {self.folder}"
        )

    def stop(self, step: int) -> None:
        """After a signal has stopped the run, print the command that resumes it."""
        if self.writer:
            self.writer.close()
        self._print(f"stopped after step {step}; to continue: {self.resume_command}")

    def _print_interval(self, step: int) -> None:
        """Print the mean training loss and accuracy since the last call, above the progress bar."""
        train = means(self.unprinted_totals, "train")
        self.unprinted_totals = torch.zeros(3)
        if self.is_main_process:
            line = f"{train['train_loss']:.4f}, accuracy {train['train_accuracy']:.4f}"
            with output_may_be_closed(), self.bar.external_write_mode():
                display(f"{self.name}, step {step}: train loss {line}")
            self.printed_at = time.monotonic()

    def _print(self, line: str) -> None:
        """In the main process, close the progress bar and print a line."""
        if self.is_main_process:
            with output_may_be_closed():
                if self.bar is not None:  # no epoch was left after a resume
                    self.bar.close()
                display(line)
            self.printed_at = time.monotonic()

    def _write(self, metrics: dict) -> None:
        if self.is_main_process:
            append_metrics(self.folder, metrics)
        if self.writer:
            for name, value in metrics.items():
                if name not in ("step", "epoch"):
                    self.writer.add_scalar(tag_of(name), value, metrics["step"])
            self.writer.flush()


def tag_of(name: str) -> str:
    """Return the TensorBoard tag of a metric in metrics.jsonl.

    `train_loss` becomes `train/loss`. What is only measured in training, such as `learning_rate`,
    becomes `train/learning_rate`. TensorBoard shows all tags with the same first part together.
    """
    group, _, rest = name.partition("_")
    return f"{group}/{rest}" if group in ("train", "test") else f"train/{name}"
