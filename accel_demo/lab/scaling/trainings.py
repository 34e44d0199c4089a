"""Training methods for a small dense model, each with one change that affects the speed."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from accel_demo.anatomy.devices import usable_cores
from accel_demo.anatomy.gil import preprocess

BATCH, SMALL, LARGE, MICRO_BATCHES = 64, 8, 512, 8
LATE = 0.020  # seconds that the straggler sleeps in each step
PREPROCESSED = 8  # images per process that "Python in the loop" preprocesses in each step
# Since torch 2.13, forward_sync_buffers replaces broadcast_buffers. Unlike broadcast_buffers=False,
# forward_sync_buffers=False still sends the buffers once, when DDP wraps the model.
IS_REPLACED = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
BUFFERS = "forward_sync_buffers" if IS_REPLACED else "broadcast_buffers"
NO_BUFFERS: dict[str, Any] = {BUFFERS: False}


def make_methods(device: torch.device) -> dict[str, "TrainingMethod"]:
    """Return all methods by name. Each method trains a separate replica of the model."""
    methods = {
        "one process": TrainingMethod(device, is_alone=True),
        "DDP": TrainingMethod(device),
        "one process, small batch": TrainingMethod(device, is_alone=True, batch=SMALL),
        "small batch": TrainingMethod(device, batch=SMALL),
        "one process, large batch": TrainingMethod(device, is_alone=True, batch=LARGE),
        "large batch": TrainingMethod(device, batch=LARGE),
        "share every micro-batch": TrainingMethod(device, batch=SMALL, micro_batches=MICRO_BATCHES),
        "no_sync": TrainingMethod(device, batch=SMALL, micro_batches=MICRO_BATCHES, no_sync=True),
        "one bucket": TrainingMethod(device, bucket_cap_mb=1000),
        "small buckets": TrainingMethod(device, bucket_cap_mb=1),
        "bf16 hook": TrainingMethod(device, hook=bf16_compress_hook),
        "gradient_as_bucket_view": TrainingMethod(device, gradient_as_bucket_view=True),
        "find_unused_parameters": TrainingMethod(device, find_unused_parameters=True),
        "no buffers": TrainingMethod(device, **NO_BUFFERS),
        "straggler": TrainingMethod(device, before=sleep_on_rank_1),
        "all threads": TrainingMethod(device, around=with_threads),
        "Python in the loop": TrainingMethod(device, before=lambda: preprocess(PREPROCESSED)),
    }
    if hasattr(os, "sched_setaffinity") and usable_cores() > 1:  # Linux only
        methods["half of the cores"] = TrainingMethod(device, around=on_half_of_the_cores)
    return methods


class TrainingMethod:
    """A replica of the model, a batch, and one change to the training step.

    If `is_alone` is true, only rank 0 trains, without DDP. `before` is called before each step, and
    `around` returns a context manager in which the steps run. `options` are passed to DDP.
    """

    def __init__(
        self,
        device: torch.device,
        is_alone: bool = False,
        batch: int = BATCH,
        micro_batches: int = 1,
        no_sync: bool = False,
        hook: Callable | None = None,
        before: Callable = lambda: None,
        around: Callable = nullcontext,
        **options,
    ):
        torch.manual_seed(0)
        self.is_alone, self.before, self.around = is_alone, before, around
        self.micro_batches, self.no_sync = micro_batches, no_sync
        self.images = torch.randn(batch, 784, device=device)
        self.labels = torch.randint(10, (batch,), device=device)
        self.model: Any = dense_model().to(device)
        if not is_alone:
            ids = None if device.type == "cpu" else [device.index]
            self.model = DistributedDataParallel(self.model, device_ids=ids, **options)
            if hook:
                self.model.register_comm_hook(None, hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def step(self) -> None:
        """Perform one optimizer step."""
        self.before()
        for index in range(self.micro_batches):
            is_last = index + 1 == self.micro_batches
            with self.model.no_sync() if self.no_sync and not is_last else nullcontext():
                F.cross_entropy(self.model(self.images), self.labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def dense_model() -> torch.nn.Module:
    """Return a model with 1.9 million gradients to send, but little computation per image."""
    layers: list[torch.nn.Module] = []
    for inputs in (784, 1024):
        layers += [torch.nn.Linear(inputs, 1024), torch.nn.BatchNorm1d(1024), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(1024, 10))


def seconds_per_step(method: TrainingMethod, steps: int, device: torch.device) -> float:
    """Return the mean seconds per step, or 0 on a rank that only waits for rank 0."""
    dist.barrier()
    waits = method.is_alone and dist.get_rank() > 0
    with method.around():
        seconds = 0.0 if waits else seconds_per_call(method.step, steps, device)
    dist.barrier()
    return seconds


def seconds_per_call(step: Callable[[], None], steps: int, device: torch.device) -> float:
    """Return the mean seconds per call of `step`, including the GPU work that it queues."""
    started_at = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return (time.perf_counter() - started_at) / steps


def sleep_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(LATE)


@contextmanager
def with_threads() -> Iterator[None]:
    """Use one thread per core (torch's default without a launcher), but at least two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(2, usable_cores()))
    yield
    torch.set_num_threads(before)


@contextmanager
def on_half_of_the_cores() -> Iterator[None]:
    """Pin all threads of this process to half of the cores. Both processes use the same half."""
    cores = sorted(os.sched_getaffinity(0))
    pin(set(cores[: max(1, len(cores) // 2)]))
    yield
    pin(set(cores))


def pin(cores: set[int]) -> None:
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # the thread may have exited
            os.sched_setaffinity(int(task.name), cores)
