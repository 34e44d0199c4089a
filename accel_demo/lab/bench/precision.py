"""Measure how much faster a training step is in bf16 than in fp32, and how much less it allocates.

accel-demo bench precision
accel-demo bench precision --repeats 1 --models tiny_cnn --steps 2

For each model, one copy trains in fp32 and one with bf16 autocast. They start with the same
weights, and train on the same images in turn, a few steps at a time.
"""

import json
import tempfile
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from accel_demo.config import MODELS, TrainConfig
from accel_demo.data import load_datasets
from accel_demo.errors import UserError
from accel_demo.lab import machine
from accel_demo.lab.measurements import Report, Table
from accel_demo.models import make_model
from accel_demo.options import Parser
from accel_demo.processes.devices import autocast_for, own_device
from accel_demo.processes.memory import keep_freed_memory

REPEATS = 5
QUICK = {"models": ["small_cnn"]}
SETTINGS = {"fp32": "no", "bf16": "bf16"}  # {name: mixed precision}
STEPS, BATCH_SIZE = 3, 128  # steps per turn, images per step
LARGE = ("resnet18", "resnet101", "vgg11")
STEPS_OF_LARGE, BATCH_SIZE_OF_LARGE = 1, 32
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


def add_options(parser: Parser) -> None:
    default = ["small_cnn", "resnet18"]
    help = f"models to train (default: {' '.join(default)})"
    parser.add_argument("--models", nargs="+", choices=MODELS, default=default, help=help)
    help = f"steps per turn (default: {STEPS}; {STEPS_OF_LARGE} for {', '.join(LARGE)})"
    parser.add_argument("--steps", type=int, metavar="N", help=help)


def measure(options: Namespace) -> Report:
    """Train each model in both settings. Report speed, memory, and how much the logits differ."""
    if options.steps is not None and options.steps < 1:
        raise UserError(f"--steps must be at least 1, got {options.steps}")
    torch.backends.cudnn.allow_tf32 = False  # compute fp32 convolutions without TF32
    keep_freed_memory()
    tables, memory, findings = [], {}, []
    for model in options.models:
        is_large = model in LARGE
        steps = options.steps or (STEPS_OF_LARGE if is_large else STEPS)
        batch_size = BATCH_SIZE_OF_LARGE if is_large else BATCH_SIZE
        trainings = {
            name: SteppedTraining(model, precision, batch_size)
            for name, precision in SETTINGS.items()
        }
        logits = {name: training.step() for name, training in trainings.items()}  # also a warm-up
        error = float((logits["bf16"] - logits["fp32"]).norm() / logits["fp32"].norm())
        findings.append(
            f"{model}: logits of the same weights differ from fp32's by {error:.0e} (bf16)"
        )
        speeds = {name: [] for name in SETTINGS}
        for repeat in tqdm(range(options.repeats), desc=model, unit="repeat"):
            for name in list(SETTINGS)[:: -1 if repeat % 2 else 1]:
                speeds[name].append(trainings[name].images_per_second(steps))
        device = trainings["fp32"].device
        title = f"{model}, {batch_size} images per step, on {device}"
        tables.append(Table(title, "images/s", speeds, "fp32"))
        for name, training in trainings.items():
            memory[f"{model}, {name}"] = [bytes_of_a_step(training) / 1e6]
    if device.type == "cpu":
        has = "has" if machine.has_bf16_instructions() else "has no"
        findings.append(f"This CPU {has} bf16 instructions.")
    title = "Most that a step allocates, without weights and optimizer state"
    return Report([*tables, Table(title, "MB", memory)], findings)


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
        events = json.loads(file.read_text())["traceEvents"]
    changes = [event for event in events if event["name"] == "[memory]"]
    changes = [change["args"] for change in sorted(changes, key=lambda change: change["ts"])]
    before = changes[0]["Total Allocated"] - changes[0]["Bytes"]
    return max(change["Total Allocated"] for change in changes) - before


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has finished its work, so that the measured time includes this work."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
