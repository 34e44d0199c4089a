"""Run train.py unchanged on one rank, and let the observer profile its steps."""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import record_function

from accel_demo import train
from accel_demo.config import TrainConfig
from accel_demo.lab.hosts import own_network
from accel_demo.lab.timeline.clocks import clock_ahead
from accel_demo.lab.timeline.result import RankProfile
from accel_demo.observer import tracing
from accel_demo.progress_bar import ProgressBar

# DDP's default. It is not passed to DDP, so that DDP limits the first bucket to 1 MiB.
DDP_BUCKET_MB = 25
STEPS_AROUND = tracing.STEPS_BEFORE + 2  # plus the profiler's warm-up, and one after the profile
BARRIERS = 20  # before the first profiled step; in the trace, they show how well the clocks agree


@dataclass(frozen=True)
class ProfileSettings:
    """Settings of a training run to profile."""

    config: TrainConfig
    steps: int  # number of profiled steps
    bucket_mb: float
    straggler: tuple[int, float] | None = None  # a rank, and its delay per step in ms


def profile_runs(
    device: torch.device, runs: list[ProfileSettings], folder: str
) -> list[RankProfile]:
    """Train once with each of these settings, and profile some steps. All ranks must call this."""
    clocks: Any = dist.new_group(backend="gloo")  # not NCCL, because the times are CPU tensors
    tracing.observe_torch(torch)
    profiles = []
    bar = ProgressBar("profiling", "run", runs, is_shown=dist.get_rank() == 0)
    for number, run in enumerate(bar):
        profiles.append(profile_run(run, number, folder, clocks))
        AcceleratorState._reset_state(reset_partial_state=True)  # for the next run
        GradientState._reset_state()
    return profiles


def profile_run(run: ProfileSettings, number: int, folder: str, clocks: Any) -> RankProfile:
    """Train once, and profile `run.steps` steps. All ranks must call this."""
    ahead_ns = []

    def compare_clocks() -> None:
        ahead_ns.append(clock_ahead(clocks))
        for _ in range(BARRIERS):
            with record_function("barrier"):
                dist.barrier(clocks)

    trace = str(Path(folder, f"run-{number}-rank-{dist.get_rank()}.json"))
    tracer = tracing.Tracer(trace, run.steps, compare_clocks)
    config = replace(
        run.config,
        epochs=1,
        max_steps=run.steps + STEPS_AROUND,
        test_samples=dist.get_world_size(),
        eval_batch_size=1,
        log_every=10**6,
        run_dir=str(Path(folder, f"run-{number}")),
    )
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
        changes(run),
        tracing.used(tracer),
    ):
        train.main(config)
    result = tracer.result
    return RankProfile(
        trace=trace,
        processes=result["processes"],
        backend=result["backend"],
        device=result["device"],
        bucket_bytes=result["bucket_bytes"],
        clock_ahead_ns=ahead_ns[0],
        wall_ms=result["wall_ms"],
        network=own_network(),
    )


@contextlib.contextmanager
def changes(run: ProfileSettings) -> Iterator[None]:
    """Change the bucket size, and delay each forward pass of the straggler."""
    make_ddp, run_forward = DDP.__init__, DDP._run_ddp_forward
    straggler, milliseconds = run.straggler or (None, 0)

    def make_changed_ddp(model: DDP, *arguments, **options) -> None:
        if run.bucket_mb != DDP_BUCKET_MB:
            options["bucket_cap_mb"] = run.bucket_mb
        make_ddp(model, *arguments, **options)

    def run_late_forward(model: DDP, *inputs, **options):
        if model.training and straggler == dist.get_rank():
            time.sleep(milliseconds / 1000)
        return run_forward(model, *inputs, **options)

    with (
        patch.object(DDP, "__init__", make_changed_ddp),
        patch.object(DDP, "_run_ddp_forward", run_late_forward),
        # end_training would destroy the process group, which the next run needs.
        patch.object(Accelerator, "end_training", lambda accelerator: None),
    ):
        yield
