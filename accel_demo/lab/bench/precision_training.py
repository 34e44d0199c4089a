"""Train one model in one setting, a few steps per call.

precision.py calls these functions in a separate process for each setting: `begin`, then `turn` once
per repetition, and finally `bytes_of_a_step`.
"""

import json
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from accel_demo.config import TrainConfig
from accel_demo.data import load_datasets
from accel_demo.models import make_model
from accel_demo.processes.devices import autocast_for, own_device
from accel_demo.processes.memory import keep_freed_memory

LEARNING_RATE = 1e-3


class SteppedTraining:
    """A model that is trained step by step, with its optimizer and its training images."""

    def __init__(self, model_name: str, precision: str, is_compiled: bool, batch_size: int):
        config = TrainConfig(model=model_name)
        self.device, self.batch_size, self.batches_done = own_device(), batch_size, 0
        self.train_set, _ = load_datasets(config)
        torch.manual_seed(config.seed)
        self.model = make_model(config).to(self.device)
        if is_compiled:
            self.model.compile()
        self.autocast = autocast_for(self.device, precision)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Train on the next batch, and return the logits and the loss."""
        first = self.batches_done * self.batch_size
        indices = [(first + number) % len(self.train_set) for number in range(self.batch_size)]
        images, labels = (part.to(self.device) for part in self.train_set.__getitems__(indices))
        with self.autocast:
            logits = self.model(images)
        loss = F.cross_entropy(logits.float(), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.batches_done += 1
        return logits.detach().float(), loss.detach()


_training: SteppedTraining  # created by `begin`


def begin(
    model_name: str, precision: str, is_compiled: bool, batch_size: int, threads: int, cache: str
) -> tuple[float, list[list[float]]]:
    """Perform the first training step. Return its duration in seconds and its logits.

    `cache` is the path of a new folder for the compiler's cache and temporary files.
    """
    global _training
    os.makedirs(cache)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    os.environ["TMPDIR"] = cache  # so that files of a killed C++ compiler are deleted with `cache`
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # hide the output of the compiler and the profiler
    torch.set_num_threads(threads)
    torch.backends.cudnn.allow_tf32 = False  # compute fp32 convolutions without TF32
    keep_freed_memory()
    _training = SteppedTraining(model_name, precision, is_compiled, batch_size)
    _take_a_small_step(_training.device)
    started_at = time.perf_counter()
    logits, _ = _training.step()
    wait_for(_training.device)
    return time.perf_counter() - started_at, logits.cpu().tolist()


def turn(steps: int) -> tuple[float, list[float]]:
    """Perform `steps` steps. Return the mean seconds per step, and the loss of each step."""
    wait_for(_training.device)
    started_at = time.perf_counter()
    losses = [_training.step()[1] for _ in range(steps)]
    wait_for(_training.device)
    seconds = (time.perf_counter() - started_at) / steps
    return seconds, [loss.item() for loss in losses]


def bytes_of_a_step() -> int:
    """Perform one more step, and return its peak memory in bytes.

    Weights and optimizer state are not included, because they are allocated before this step. On a
    CPU, torch's profiler records all allocations, including those in compiled code.
    """
    device = _training.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        _training.step()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _training.step()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    changes = [event for event in events if event["name"] == "[memory]"]
    changes = [change["args"] for change in sorted(changes, key=lambda change: change["ts"])]
    before = changes[0]["Total Allocated"] - changes[0]["Bytes"]
    return max(change["Total Allocated"] for change in changes) - before


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has finished its work, so that the measured time includes this work."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _take_a_small_step(device: torch.device) -> None:
    """Train a small layer for one step, to load the optimizer and the kernels before timing."""
    layer = torch.nn.Conv2d(1, 8, 3, device=device)
    optimizer = torch.optim.AdamW(layer.parameters())
    F.cross_entropy(
        layer(torch.ones(8, 1, 9, 9, device=device)).flatten(1),
        torch.zeros(8, dtype=torch.long, device=device),
    ).backward()
    optimizer.step()
    wait_for(device)
