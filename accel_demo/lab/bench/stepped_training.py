"""A model that `accel-demo bench precision` trains step by step."""

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from accel_demo.config import TrainConfig
from accel_demo.data import load_datasets
from accel_demo.models import make_model
from accel_demo.processes.devices import autocast_for, own_device

LEARNING_RATE = 1e-3


@dataclass
class SteppedTraining:
    """A model that is trained step by step, with its optimizer and its training images."""

    model_name: str
    precision: str
    batch_size: int

    def __post_init__(self) -> None:
        config = TrainConfig(model=self.model_name)
        self.device, self.batches_done = own_device(), 0
        self.train_set, _ = load_datasets(config)
        torch.manual_seed(config.seed)
        self.model = make_model(config).to(self.device)
        self.autocast = autocast_for(self.device, self.precision)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)

    def step(self) -> torch.Tensor:
        """Train on the next batch, and return the logits."""
        first = self.batches_done * self.batch_size
        indices = [(first + number) % len(self.train_set) for number in range(self.batch_size)]
        images, labels = (part.to(self.device) for part in self.train_set.__getitems__(indices))
        with self.autocast:
            logits = self.model(images)
        F.cross_entropy(logits.float(), labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.batches_done += 1
        return logits.detach().float()

    def images_per_second(self, steps: int) -> float:
        """Train for `steps` steps, and return the mean number of images per second."""
        wait_for(self.device)
        started_at = time.perf_counter()
        for _ in range(steps):
            self.step()
        wait_for(self.device)
        return steps * self.batch_size / (time.perf_counter() - started_at)


def bytes_of_a_step(training: SteppedTraining) -> int:
    """Perform one more step, and return its peak memory in bytes.

    Weights and optimizer state are not included, because they are allocated before this step.
    """
    device = training.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        training.step()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        training.step()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    changes = [event for event in events if event["name"] == "[memory]"]
    changes = [change["args"] for change in sorted(changes, key=lambda change: change["ts"])]
    before = changes[0]["Total Allocated"] - changes[0]["Bytes"]
    return max(change["Total Allocated"] for change in changes) - before


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has finished its work, so that the measured time includes this work."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
