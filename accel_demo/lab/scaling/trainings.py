"""Ways to train a small dense network, each with one thing that makes it slower, or quicker."""

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
LATE = 0.020  # seconds that the straggler sleeps
PREPROCESSED = 8  # images in pure Python, per step and process
OPTIONS = signature(DistributedDataParallel).parameters
BUFFERS = "forward_sync_buffers"
if BUFFERS not in OPTIONS:  # before torch 2.15, which warns of this name
    BUFFERS = "broadcast_buffers"


def make_ways(device: torch.device) -> dict[str, "Training"]:
    """All of them by name, each with a replica of its own."""
    without_buffers: dict[str, Any] = {BUFFERS: False}
    ways = {
        "one process": Training(device, is_alone=True),
        "DDP": Training(device),
        "one process, small batch": Training(device, is_alone=True, batch=SMALL),
        "small batch": Training(device, batch=SMALL),
        "one process, large batch": Training(device, is_alone=True, batch=LARGE),
        "large batch": Training(device, batch=LARGE),
        "share every micro-batch": Training(device, batch=SMALL, micro_batches=MICRO_BATCHES),
        "no_sync": Training(device, batch=SMALL, micro_batches=MICRO_BATCHES, no_sync=True),
        "one bucket": Training(device, bucket_cap_mb=1000),
        "small buckets": Training(device, bucket_cap_mb=1),
        "bf16 hook": Training(device, hook=bf16_compress_hook),
        "gradient_as_bucket_view": Training(device, gradient_as_bucket_view=True),
        "find_unused_parameters": Training(device, find_unused_parameters=True),
        "no buffers": Training(device, **without_buffers),
        "straggler": Training(device, before=sleep_on_rank_1),
        "all threads": Training(device, around=with_threads),
        "Python in the loop": Training(device, before=lambda: preprocess(PREPROCESSED)),
    }
    if hasattr(os, "sched_setaffinity") and usable_cores() > 1:  # only Linux can pin
        ways["half of the cores"] = Training(device, around=on_half_of_the_cores)
    return ways


class Training:
    """One way to train: a replica of its own, a batch, and one thing that is different."""

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
        self.model: Any = network().to(device)
        if not is_alone:
            ids = None if device.type == "cpu" else [device.index]
            self.model = DistributedDataParallel(self.model, device_ids=ids, **options)
            if hook:
                self.model.register_comm_hook(None, hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def step(self) -> None:
        """One step of the optimizer."""
        self.before()
        for index in range(self.micro_batches):
            is_open = self.no_sync and index + 1 < self.micro_batches
            with self.model.no_sync() if is_open else nullcontext():
                F.cross_entropy(self.model(self.images), self.labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def network() -> torch.nn.Module:
    """1.9 million parameters: much to send, for what it computes with a small batch."""
    layers: list[torch.nn.Module] = []
    for inputs in (784, 1024):
        layers += [torch.nn.Linear(inputs, 1024), torch.nn.BatchNorm1d(1024), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(1024, 10))


def run(way: Training, steps: int, device: torch.device) -> float:
    """Seconds per step. Where the way is one process alone, the other ranks wait at a barrier."""
    dist.barrier()
    spent = 0.0
    if not way.is_alone or dist.get_rank() == 0:
        with way.around():
            spent = seconds(way.step, steps, device)
    dist.barrier()
    return spent


def seconds(step: Callable[[], None], steps: int, device: torch.device) -> float:
    """Per call of `step`. A GPU computes while Python goes on: it is waited for."""
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
    """As many threads in each process as there are cores: torch's default without a launcher."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(2, usable_cores()))
    yield
    torch.set_num_threads(before)


@contextmanager
def on_half_of_the_cores() -> Iterator[None]:
    """All threads of this process on the same half of the cores as those of the other."""
    cores = sorted(os.sched_getaffinity(0))
    pin(set(cores[: max(1, len(cores) // 2)]))
    yield
    pin(set(cores))


def pin(cores: set[int]) -> None:
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # a thread may end meanwhile
            os.sched_setaffinity(int(task.name), cores)
