"""Time the forward pass of DataParallel and DDP, with and without Python code in it.

This is the part of `accel-demo bench dataparallel` behind its flag --forward. It leaves out the
backward pass, because autograd runs it in a single thread on a CPU, whatever DataParallel does. The
Python code stands for a slow `forward` and has no other purpose.
"""

import os
import random
import statistics
import time
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_demo.anatomy import gil
from accel_demo.anatomy.data_parallel.phases import DataParallel
from accel_demo.config import TrainConfig
from accel_demo.errors import UserError
from accel_demo.lab.measurements import Report, Table, interval_text, median_interval
from accel_demo.models import CLASSES, make_model
from accel_demo.processes.connect import gather_objects
from accel_demo.processes.group import results_by_rank
from accel_demo.processes.memory import keep_freed_memory
from accel_demo.progress_bar import ProgressBar

PROCESSES = 2
STEPS = 2  # per measurement
COPIES = 4  # random images that are computed in Python for each image
ONE, DP, DDP = "one process, 1 thread", "DataParallel, 2 threads", "DDP, 2 processes"
MODELS = ("{model}", "{model} with Python code in it")


class Case(NamedTuple):
    """One way to train. All cases use the same global batch."""

    method: str  # ONE, DP or DDP
    has_python: bool  # whether the forward pass also runs code in pure Python


class WithPython(nn.Module):
    """A model whose forward pass takes most of its time in pure Python."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        gil.preprocess(COPIES * len(images))  # the result is not used: only its time matters
        return self.model(images)


class Training:
    """A model with its optimizer and its part of a batch, all on one device or on two GPUs."""

    def __init__(self, case: Case, model_name: str, batch: int, device: torch.device):
        torch.manual_seed(0)
        model = make_model(TrainConfig(model=model_name)).to(device)
        model = WithPython(model) if case.has_python else model
        self.images = torch.randn(batch, 1, 28, 28, device=device)
        self.labels = torch.arange(batch, device=device) % CLASSES
        self.wrapped, self.device = model, device
        if case.method == DP and device.type == "cuda":
            self.wrapped = nn.DataParallel(model, list(range(PROCESSES)))
        elif case.method == DP:
            self.wrapped = DataParallel(model, PROCESSES)
        elif case.method == DDP:
            self.wrapped = DistributedDataParallel(model)
            self.images, self.labels = (
                tensor.chunk(PROCESSES)[dist.get_rank()] for tensor in (self.images, self.labels)
            )
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def run(self, steps: int) -> float:
        """Train for some steps, and return the mean seconds of their forward passes."""
        forward = 0.0
        for _ in range(steps):
            started_at = self.now()
            outputs = self.wrapped(self.images)
            forward += self.now() - started_at
            F.cross_entropy(outputs, self.labels).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return forward / steps

    def now(self) -> float:
        """Return the time, after the GPUs in use have finished their work."""
        if self.device.type == "cuda":
            for index in range(PROCESSES if isinstance(self.wrapped, nn.DataParallel) else 0):
                torch.cuda.synchronize(index)
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def measure(model_name: str, batch: int, repeats: int) -> Report:
    """Measure every case `repeats` times, in a different order in each repeat."""
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    if threads != "1":  # each thread of DataParallel would use this many
        raise UserError(f"--forward needs OMP_NUM_THREADS=1, got {threads}")
    results = results_by_rank(measure_on_rank, PROCESSES, model_name, batch, repeats)
    seconds, device = results[0]
    tables, findings = [], []
    for has_python, name in enumerate(MODELS):
        rates = {
            method: [batch / measured for measured in seconds[method, bool(has_python)]]
            for method in (ONE, DP, DDP)
        }
        title = f"Forward pass of {name.format(model=model_name)}"
        tables.append(Table(f"{title}, {batch} images per step", "images/s", rates, ONE, digits=0))
        ratios = [ddp / dp for ddp, dp in zip(rates[DDP], rates[DP], strict=True)]
        times, interval = statistics.median(ratios), interval_text(median_interval(ratios))
        findings.append(
            f"{title}: DDP is {times:.2f} times as fast as DataParallel (90 % interval {interval})."
        )
    used = "nn.DataParallel on two GPUs" if device == "cuda" else "our DataParallel on the CPU"
    findings.append(f"Measured with {used}. Each thread and each process uses one CPU core.")
    return Report(tables, findings, {"processes": PROCESSES, "device": device})


def measure_on_rank(
    device: torch.device, model_name: str, batch: int, repeats: int
) -> tuple[dict[Case, list[float]], str]:
    """Return the seconds of each forward pass, and the kind of device.

    The times of DDP are those of the slowest rank.

    Only rank 0 measures the methods with one process, and the other ranks wait. They wait in gloo,
    because waiting in NCCL would keep their GPUs busy.
    """
    keep_freed_memory()  # as the train files do
    quiet = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
    cases = [Case(method, has_python) for method in (ONE, DP, DDP) for has_python in (False, True)]
    trainings = {
        case: Training(case, model_name, batch, device)
        for case in cases
        if case.method == DDP or dist.get_rank() == 0
    }
    seconds: dict[Case, list[float]] = {case: [] for case in cases}
    rounds = range(repeats + 1)  # the first one is warm-up
    for repeat in ProgressBar("forward", "repeat", rounds, is_shown=dist.get_rank() == 0):
        for case in random.Random(repeat).sample(cases, len(cases)):
            dist.barrier(quiet)
            if case in trainings:
                seconds[case].append(trainings[case].run(STEPS))
            dist.barrier(quiet)
    for case in cases:
        by_rank = [of_rank for of_rank in gather_objects(seconds[case]) if of_rank]
        repetitions = list(zip(*by_rank, strict=True))[1:]  # the first one is warm-up
        seconds[case] = [max(ranks) for ranks in repetitions]
    return seconds, device.type
