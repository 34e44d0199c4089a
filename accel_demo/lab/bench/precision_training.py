"""One process that trains one network in one precision, some steps whenever it is told to.

precision.py starts one for each way. `begin` comes first.
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
from accel_demo.lab.bench.limit import wait_for
from accel_demo.models import make_model
from accel_demo.processes.connect import autocast_for, own_device
from accel_demo.workarounds import keep_freed_memory

LEARNING_RATE = 1e-3


class Training:
    """A network, its optimizer, and the images it is at."""

    def __init__(self, model: str, precision: str, is_compiled: bool, batch_size: int):
        config = TrainConfig(model=model)
        self.device, self.batch_size, self.batches_done = own_device(), batch_size, 0
        self.train_set, _ = load_datasets(config)
        torch.manual_seed(config.seed)
        self.network = make_model(config).to(self.device)
        if is_compiled:
            self.network.compile()
        self.autocast = autocast_for(self.device, precision)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=LEARNING_RATE)

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """One step of training, as train_plain.py takes it; gives logits and loss."""
        first = self.batches_done * self.batch_size
        chosen = [(first + number) % len(self.train_set) for number in range(self.batch_size)]
        images, labels = (part.to(self.device) for part in self.train_set.__getitems__(chosen))
        with self.autocast:
            logits = self.network(images)
        loss = F.cross_entropy(logits.float(), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.batches_done += 1
        return logits.detach().float(), loss.detach()


_training: Training  # of this process


def begin(
    model: str, precision: str, is_compiled: bool, batch_size: int, threads: int, cache: str
) -> dict:
    """Take the first step: its "seconds", and the "logits" of its images.

    What is compiled is kept in the folder `cache`, and nothing from elsewhere is used.
    """
    global _training
    os.makedirs(cache)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    os.environ["TMPDIR"] = cache  # where a C++ compiler that is killed leaves its files
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # compiler and profiler talk; an error goes to precision.py
    torch.set_num_threads(threads)
    torch.backends.cudnn.allow_tf32 = False  # fp32 means fp32
    keep_freed_memory()
    _training = Training(model, precision, is_compiled, batch_size)
    _load_what_every_way_needs(_training.device)
    started_at = time.perf_counter()
    logits, _ = _training.step()
    wait_for(_training.device)
    return {"seconds": time.perf_counter() - started_at, "logits": logits.cpu().tolist()}


def turn(steps: int) -> tuple[float, list[float]]:
    """Seconds per step of so many steps, and the loss of each."""
    wait_for(_training.device)
    started_at = time.perf_counter()
    losses = [_training.step()[1] for _ in range(steps)]
    wait_for(_training.device)
    seconds = (time.perf_counter() - started_at) / steps
    return seconds, [loss.item() for loss in losses]


def bytes_of_a_step() -> int:
    """The most bytes that one more step allocates on the device at a time.

    What stays from step to step, weights and optimizer state, is there before and not counted. On a
    CPU torch's profiler notes each allocation, also those of compiled code.
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
    notes = [event for event in events if event["name"] == "[memory]"]
    notes = [note["args"] for note in sorted(notes, key=lambda note: note["ts"])]
    before = notes[0]["Total Allocated"] - notes[0]["Bytes"]
    return max(note["Total Allocated"] for note in notes) - before


def _load_what_every_way_needs(device: torch.device) -> None:
    """The first optimizer and the first kernels of a process take seconds, whatever the way."""
    layer = torch.nn.Conv2d(1, 8, 3, device=device)
    optimizer = torch.optim.AdamW(layer.parameters())
    F.cross_entropy(
        layer(torch.ones(8, 1, 9, 9, device=device)).flatten(1),
        torch.zeros(8, dtype=torch.long, device=device),
    ).backward()
    optimizer.step()
    wait_for(device)
