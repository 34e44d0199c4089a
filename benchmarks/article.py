"""Compare how fast our training loop and an article's loop train ResNet-101.

python benchmarks/article.py
python benchmarks/article.py --quick --json article.json

The article inspired this course. Its loop trains in fp32 with PyTorch's default memory format,
reads images one by one with torchvision, and calls `loss.item()` every ten steps. Our loop is
train.py. It uses the channels-last memory format, reads whole batches, keeps losses on the device,
and reuses freed memory. It runs in fp32, and in bf16 unless the CPU lacks bf16 instructions. Both
train with Adam on 256 packaged images per step (32 with --quick), on the same cores or GPU. Every
run has a new process, and its first steps are not measured.
"""

import os
import tempfile
import time
from argparse import Namespace
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from itertools import islice

import torch
from baseline import TorchvisionSet
from measuring import in_turns, main
from torch import nn
from torch.utils.data import DataLoader
from torchvision import models

from accel_demo.config import TrainConfig
from accel_demo.data import load_images
from accel_demo.lab import machine, pool_worker
from accel_demo.lab.bench.stepped_training import wait_for
from accel_demo.lab.measurements import Report, Table
from accel_demo.processes.devices import own_device
from accel_demo.processes.launch import spawn

REPEATS = 5
DEVICE = own_device()
STEPS, WARM_UP = (4, 2) if DEVICE.type == "cpu" else (40, 10)  # an epoch has 46 steps
BATCH_SIZE, QUICK_BATCH_SIZE, LEARNING_RATE = 256, 32, 1e-3
CHOICES = {"model": "resnet101", "optimizer": "adam", "learning_rate": LEARNING_RATE}
CHOICES |= {"warmup": 0.0, "label_smoothing": 0.0, "test_samples": 20}
ARTICLE = "the article's loop"


def measure(options: Namespace) -> Report:
    """Train with both loops once for each seed, and compare their speeds."""
    batch_size = QUICK_BATCH_SIZE if options.quick else BATCH_SIZE
    loops = {ARTICLE: train_article, "ours, fp32": partial(train_ours, "no")}
    if DEVICE.type != "cpu" or machine.has_bf16_instructions():
        loops["ours, bf16"] = partial(train_ours, "bf16")
    # Each run has a new process, which Ctrl-C and SIGTERM kill at once
    sides = {
        name: partial(spawn, loop, 1, batch_size, stop_at_once=True) for name, loop in loops.items()
    }
    runs = in_turns(sides, options.repeats, "training")
    used = {(run["device"], run["threads"]) for results in runs.values() for [run] in results}
    if len(used) > 1:
        raise RuntimeError(f"the two loops used different devices or threads: {used}")
    rates = {name: [batch_size / run["seconds_per_step"] for [run] in runs[name]] for name in runs}
    return Report([Table("Training ResNet-101", "images/s", rates, reference=ARTICLE)], [])


def train_ours(precision: str, batch_size: int, seed: int) -> dict:
    with (
        tempfile.TemporaryDirectory() as run_dir,
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
    ):
        choices = {**CHOICES, "batch_size": batch_size, "max_steps": STEPS, "seed": seed}
        choices["run_dir"] = run_dir
        return {**pool_worker.run("Accelerate", choices, precision, warm_up=WARM_UP)}


def train_article(batch_size: int, seed: int) -> dict:
    """Train with the article's loop, and return fields that `train_ours` returns too."""
    torch.manual_seed(seed)
    train_set, _ = load_images(TrainConfig())
    train_set = TorchvisionSet(train_set.pixels[..., 0], train_set.labels, (0.5,), (1.0,))
    train_loader = DataLoader(train_set, batch_size, shuffle=True)
    model, started_at = make_model().to(DEVICE).train(), 0.0
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for step, (images, labels) in enumerate(islice(train_loader, STEPS), start=1):
        images, labels = images.to(DEVICE), labels.to(DEVICE)
        optimizer.zero_grad()
        loss = loss_function(model(images), labels)
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            loss.item()  # the article prints it; on a GPU, this waits for the step
        if step == WARM_UP:
            wait_for(DEVICE)
            started_at = time.perf_counter()
    wait_for(DEVICE)
    seconds = (time.perf_counter() - started_at) / (STEPS - WARM_UP)
    used = {"device": DEVICE.type, "threads": torch.get_num_threads()}
    return {"seconds_per_step": seconds, **used}


def make_model() -> nn.Module:
    """Return torchvision's ResNet-101, adapted to ten classes and one-channel images."""
    model = models.resnet101(num_classes=10)
    model.conv1 = nn.Conv2d(1, 64, kernel_size=7, stride=2, padding=3, bias=False)
    return model


if __name__ == "__main__":
    main()
