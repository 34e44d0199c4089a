"""Totals that add up over processes: loss, accuracy, images per second."""

import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from accel_demo.config import TrainConfig
from accel_demo.run_folder import append_metrics, write_json


def batch_totals(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of losses, correct predictions and images of one batch: float32 [3] on its device.

    Totals may be added up over batches and over processes; means may not, because the parts need
    not be equally large. Nothing here waits for the device. `logits` is [B, classes], `labels`
    int64 [B]. Float32 counts exactly up to 16.7 million images.
    """
    logits = logits.detach().float()
    loss = F.cross_entropy(logits, labels, reduction="sum")
    correct = (logits.argmax(dim=1) == labels).sum()
    return torch.stack((loss, correct.float(), torch.full_like(loss, len(labels))))


class TrainLog:
    """What a run says: a progress bar, metrics.jsonl, a line per epoch, a summary at the end.

    Only the main process speaks. Images per second are global, and count training alone. `state`
    is what a checkpoint has kept of an earlier one, or empty. `track` is "tensorboard" or "no";
    train.py leaves that to Accelerate's own tracker.
    """

    def __init__(self, run: Path, is_main_process: bool, state: dict, track: str = "no"):
        self.run = run
        self.is_main_process = is_main_process
        self.writer = None
        if track == "tensorboard" and is_main_process:
            from torch.utils.tensorboard import SummaryWriter

            purge_step = state.get("step", 0) + 1  # a viewer forgets what came after that
            self.writer = SummaryWriter(run / "tensorboard", purge_step=purge_step)
        self.step = state.get("step", 0)
        self.images = state.get("images", 0.0)  # trained on so far, in so many seconds
        self.seconds = state.get("seconds", 0.0)
        self.test_accuracy = state.get("test_accuracy", 0.0)
        self.best_test_accuracy = state.get("best_test_accuracy", 0.0)
        self.epoch_totals = torch.tensor(state.get("epoch_totals", [0.0, 0.0, 0.0]))

    def state(self) -> dict:
        """What a checkpoint keeps of it, as JSON has it, to be given to the one that goes on."""
        metrics = self.run / "metrics.jsonl"
        return {
            "step": self.step,
            "images": self.images,
            "seconds": self.seconds,
            "test_accuracy": self.test_accuracy,
            "best_test_accuracy": self.best_test_accuracy,
            "epoch_totals": self.epoch_totals.tolist(),
            "metrics_bytes": metrics.stat().st_size if metrics.exists() else 0,
        }

    def restart_clock(self) -> None:
        """Leave out of the next interval what has been done since the last."""
        self.interval_started_at = time.perf_counter()

    def start_epoch(self, epoch: int, config: TrainConfig, batches: int, done: int = 0) -> tqdm:
        """Start the clock, and a bar over the `batches` of this epoch. `done` of them are done."""
        self.epoch, self.name = epoch + 1, f"epoch {epoch + 1}/{config.epochs}"
        if not done:
            self.epoch_totals = torch.zeros(3)
        self.bar = tqdm(
            total=batches,
            initial=done,
            desc=self.name,
            unit="batch",
            leave=False,
            disable=not self.is_main_process,
        )
        self.restart_clock()
        return self.bar

    def interval(self, step: int, learning_rate: float, totals: torch.Tensor) -> dict:
        """Metrics of the images since the last interval, from totals summed over all processes.

        Here the host waits for the device; the loop calls it every `log_every` steps only.
        """
        self.step, totals, now = step, totals.cpu(), time.perf_counter()
        seconds, self.interval_started_at = now - self.interval_started_at, now
        self.epoch_totals += totals
        self.images += totals[2].item()
        self.seconds += seconds
        metrics = {
            "step": step,
            "epoch": self.epoch,
            "learning_rate": learning_rate,
            **_means(totals, "train"),
            "images_per_second": totals[2].item() / seconds,
        }
        self.bar.set_postfix_str(
            f"loss {metrics['train_loss']:.3f}, accuracy {metrics['train_accuracy']:.3f}, "
            f"{metrics['images_per_second']:,.0f} images/s",
            refresh=False,
        )
        self._write(metrics)
        return metrics

    def end_epoch(self, step: int, test_totals: torch.Tensor) -> dict:
        """Metrics of an evaluation, from totals over the whole test set."""
        self.bar.close()
        metrics = {"step": step, "epoch": self.epoch, **_means(test_totals.cpu(), "test")}
        self.test_accuracy = metrics["test_accuracy"]
        self.best_test_accuracy = max(self.best_test_accuracy, self.test_accuracy)
        train = _means(self.epoch_totals, "train")
        self._write(metrics)
        if self.is_main_process:
            print(
                f"{self.name}: train loss {train['train_loss']:.4f}, "
                f"accuracy {train['train_accuracy']:.4f}; test loss {metrics['test_loss']:.4f}, "
                f"accuracy {metrics['test_accuracy']:.4f}",
                flush=True,
            )
        return metrics

    def finish(self, world_size: int, device: torch.device) -> None:
        """The summary: one line, and summary.json."""
        summary = {
            "test_accuracy": self.test_accuracy,
            "best_test_accuracy": self.best_test_accuracy,
            "images_per_second": self.images / self.seconds,
            "train_seconds": self.seconds,
            "processes": world_size,
            "device": device.type,
        }
        if device.type == "cuda":
            summary["peak_gpu_memory_bytes"] = torch.cuda.max_memory_allocated(device)
        if self.writer:
            self.writer.close()
        write_json(self.run / "summary.json", summary)
        print(
            f"done: test accuracy {self.test_accuracy:.4f}, "
            f"{summary['images_per_second']:,.0f} images/s, {self.seconds:.1f} s of training, "
            f"{world_size} process{'es' if world_size > 1 else ''} on {device.type}; "
            f"saved in {self.run}",
            flush=True,
        )

    def stopped(self, step: int, command: str) -> None:
        """The last line of a run that was asked to stop; `command` is what to type to go on."""
        self.bar.close()
        if self.writer:
            self.writer.close()
        if self.is_main_process:
            print(f"stopped after step {step}; to go on: {command}", flush=True)

    def _write(self, metrics: dict) -> None:
        if self.is_main_process:
            append_metrics(self.run, metrics)
        if self.writer:
            for name, value in metrics.items():
                self.writer.add_scalar(name, value, metrics["step"])


def _means(totals: torch.Tensor, prefix: str) -> dict[str, float]:
    loss, correct, images = totals.tolist()
    return {f"{prefix}_loss": loss / images, f"{prefix}_accuracy": correct / images}
