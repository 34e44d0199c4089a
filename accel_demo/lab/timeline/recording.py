"""Run train.py unchanged on one rank, profile it, and mark the phases of each step."""

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
from accelerate.data_loader import DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import profile, record_function, schedule, supported_activities
from tqdm import tqdm

from accel_demo import train
from accel_demo.config import TrainConfig
from accel_demo.lab.hosts import own_network
from accel_demo.lab.timeline import merge
from accel_demo.lab.timeline.result import RankProfile
from accel_demo.processes.devices import own_device

# DDP's default. It is not passed to DDP, so that DDP limits the first bucket to 1 MiB.
DDP_BUCKET_MB = 25
STEPS_BEFORE = 3  # before the profile, while DDP rebuilds its buckets and torch allocates memory
STEPS_AROUND = STEPS_BEFORE + 2  # plus a profiler warm-up step, and a last step that train.py logs
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
    steps, profiles = sum(run.steps + STEPS_AROUND for run in runs), []
    with tqdm(total=steps, unit="step", disable=dist.get_rank() > 0) as bar:
        for number, run in enumerate(runs):
            trace = Path(folder, f"run-{number}-rank-{dist.get_rank()}.json")
            recording = Recording(run, trace, clocks, bar)
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
                open(os.devnull, "w") as nowhere,
                contextlib.redirect_stdout(nowhere),
                contextlib.redirect_stderr(nowhere),
                hooks(recording),
            ):
                train.main(config)
            profiles.append(recording.result())
            AcceleratorState._reset_state(reset_partial_state=True)  # for the next run
            GradientState._reset_state()
    return profiles


@contextlib.contextmanager
def hooks(recording: "Recording") -> Iterator[None]:
    """Patch torch and Accelerate, so that `recording` marks the phases of each training step.

    "data wait" lasts until the loader returns a batch. "forward" lasts until `Tensor.backward` is
    called, so it includes the loss. "optimizer" lasts from the end of backward to the end of
    `optimizer.zero_grad`, so it includes gradient clipping.
    """
    make_ddp, backward = DDP.__init__, torch.Tensor.backward
    zero_grad, iterate = AcceleratedOptimizer.zero_grad, DataLoaderShard.__iter__

    def make_marked_ddp(model: DDP, *arguments, **options) -> None:
        if recording.run.bucket_mb != DDP_BUCKET_MB:
            options["bucket_cap_mb"] = recording.run.bucket_mb
        make_ddp(model, *arguments, **options)
        model.register_forward_pre_hook(recording.begin_forward)
        recording.model = model

    def marked_backward(loss: torch.Tensor, *arguments, **options) -> None:
        recording.mark("backward")
        backward(loss, *arguments, **options)
        recording.mark("optimizer")

    def marked_zero_grad(optimizer: AcceleratedOptimizer, *arguments, **options) -> None:
        zero_grad(optimizer, *arguments, **options)
        recording.mark(None)

    def marked_batches(loader: DataLoaderShard) -> Iterator:
        if not torch.is_grad_enabled():  # do not mark evaluation
            yield from iterate(loader)
            return
        batches, window = iterate(loader), GradientState().num_steps
        for number in range(len(loader)):
            recording.is_new_step = number % window == 0
            if recording.is_new_step:
                recording.begin_step()
            recording.mark("data wait")
            batch = next(batches)
            recording.mark(None)
            yield batch

    with (
        patch.object(DDP, "__init__", make_marked_ddp),
        patch.object(torch.Tensor, "backward", marked_backward),
        patch.object(AcceleratedOptimizer, "zero_grad", marked_zero_grad),
        patch.object(DataLoaderShard, "__iter__", marked_batches),
        # end_training would destroy the process group, which the next run needs.
        patch.object(Accelerator, "end_training", lambda accelerator: None),
    ):
        yield


class Recording:
    """The phase marks, step times and clock offset of one run on this rank."""

    def __init__(self, run: ProfileSettings, trace: Path, clocks: dist.ProcessGroup, bar: tqdm):
        self.run, self.trace, self.clocks, self.bar = run, trace, clocks, bar
        self.profiler = profile(
            activities=supported_activities(),
            schedule=schedule(
                skip_first=STEPS_BEFORE, wait=0, warmup=1, active=run.steps, repeat=1
            ),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(trace)),
            record_shapes=True,  # needed to compute how many bytes are sent
        )
        straggler, milliseconds = run.straggler or (None, 0)
        self.delay_seconds = milliseconds / 1000 if straggler == dist.get_rank() else 0
        self.steps_begun, self.is_new_step, self.device = 0, True, own_device()
        self.phase = contextlib.ExitStack()  # the record_function of the current phase, if any
        self.step = contextlib.ExitStack()  # the record_function of the current step, if any
        self.model: Any = None  # the DDP module, once train.py has created it
        self.clock_ahead_ns = 0
        self.wall_ms: dict[int, float] = {}

    def mark(self, phase: str | None) -> None:
        """End the current phase. Begin `phase`, unless it is None."""
        self.phase.close()
        if phase:
            self.phase.enter_context(record_function(phase))

    def begin_step(self) -> None:
        """End the previous step and begin the next step. Only profiled steps are marked."""
        first, last = STEPS_BEFORE + 2, STEPS_BEFORE + 1 + self.run.steps
        if first <= self.steps_begun <= last:
            if self.device.type != "cpu":
                torch.accelerator.synchronize()  # so that the step includes all its kernels
            self.step.close()
            self.wall_ms[self.steps_begun] = 1000 * (time.perf_counter() - self.started_at)
        self.steps_begun += 1
        self.bar.update()
        if self.steps_begun == 1:
            self.profiler.start()
        elif self.steps_begun <= last + 1:
            self.profiler.step()
        if self.steps_begun == first:
            self.clock_ahead_ns = merge.clock_ahead(self.clocks)
            for _ in range(BARRIERS):
                with record_function("barrier"):
                    dist.barrier(self.clocks)
        elif self.steps_begun == last + 1:
            self.profiler.stop()
        if first <= self.steps_begun <= last:
            self.started_at = time.perf_counter()
            self.step.enter_context(record_function(f"step {self.steps_begun}"))

    def begin_forward(self, module: torch.nn.Module, inputs: tuple) -> None:
        """DDP's forward pre-hook: mark the start of the forward pass, and delay the straggler."""
        if module.training:
            self.mark("forward")
            if self.is_new_step:
                time.sleep(self.delay_seconds)

    def result(self) -> RankProfile:
        sizes = []  # stays empty on one process, because nothing is sent
        if dist.get_world_size() > 1:
            data = self.model._get_ddp_logging_data()
            sizes = (data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]).split(",")
        return RankProfile(
            trace=str(self.trace),
            processes=dist.get_world_size(),
            backend=dist.get_backend(),
            device=self.device.type,
            bucket_bytes=[int(size) for size in sizes],
            clock_ahead_ns=self.clock_ahead_ns,
            wall_ms=self.wall_ms,
            network=own_network(),
        )
