"""One rank of the profiled run: train.py as it is, and a mark where each phase of a step begins."""

import contextlib
import os
import time
from collections.abc import Iterator
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
from accel_demo.lab.timeline import merge
from accel_demo.processes.connect import own_device

STEPS_BEFORE = 3  # not profiled: in the first ones DDP lays its buckets anew, and memory is taken
STEPS_AROUND = STEPS_BEFORE + 2  # and a warm-up of the profiler, and a last one, which is logged
BARRIERS = 20  # marked in the trace before the first profiled step: all ranks see each of them


def profile_runs(device: torch.device, runs: list[dict], folder: str) -> list[dict]:
    """Train once for each of `runs`, and profile some steps: what this rank found, run by run.

    A run is {"choices": fields of TrainConfig, "steps": how many to profile, "bucket_mb",
    "straggler": None or [rank, milliseconds]}. With "clock_ahead_ms" the last rank's clock, and
    with it its trace, goes that far ahead, as another machine's may. All are to call this together.
    """
    clocks: Any = dist.new_group(backend="gloo")  # clocks are read on the CPU, whatever trains
    steps = sum(run["steps"] + STEPS_AROUND for run in runs)
    with tqdm(total=steps, unit="step", disable=dist.get_rank() > 0) as bar:
        return [
            _profile(run, Path(folder, f"run-{number}"), clocks, bar)
            for number, run in enumerate(runs)
        ]


def _profile(run: dict, folder: Path, clocks: dist.ProcessGroup, bar: tqdm) -> dict:
    folder.mkdir(exist_ok=True)
    recording = Recording(run, folder / f"rank-{dist.get_rank()}.json", clocks, bar)
    choices = {"log_every": 10**6, "epochs": 1, "test_samples": dist.get_world_size()}
    choices |= {"eval_batch_size": 1, "run_dir": str(folder / "run")}
    config = TrainConfig(**choices, max_steps=run["steps"] + STEPS_AROUND, **run["choices"])
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
        hooks(recording),
    ):
        train.main(config)
    AcceleratorState._reset_state(reset_partial_state=True)  # the next run makes its own
    GradientState._reset_state()
    return recording.found


@contextlib.contextmanager
def hooks(recording: "Recording") -> Iterator[None]:
    """Let torch and Accelerate call `recording` when a phase of a training step begins.

    "data wait" is a request for a batch. "forward" lasts until `Tensor.backward` is called, so it
    includes the loss. "optimizer" lasts from there to the end of `optimizer.zero_grad`, so it
    includes clipping.
    """
    make_ddp, backward = DDP.__init__, torch.Tensor.backward
    zero_grad, read = AcceleratedOptimizer.zero_grad, DataLoaderShard.__iter__

    def make_marked_ddp(model: DDP, *arguments, **options) -> None:
        make_ddp(model, *arguments, **options | {"bucket_cap_mb": recording.run["bucket_mb"]})
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
        if not torch.is_grad_enabled():  # an evaluation
            yield from read(loader)
            return
        batches, window = read(loader), GradientState().num_steps
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
        patch.object(Accelerator, "end_training", lambda accelerator: None),  # another run follows
    ):
        yield


class Recording:
    """The marks and the clock of one run: `found` is what this rank has to tell of it."""

    def __init__(self, run: dict, trace: Path, clocks: dist.ProcessGroup, bar: tqdm):
        self.run, self.trace, self.clocks, self.bar = run, trace, clocks, bar
        self.profiler = profile(
            activities=supported_activities(),
            schedule=schedule(
                skip_first=STEPS_BEFORE, wait=0, warmup=1, active=run["steps"], repeat=1
            ),
            on_trace_ready=self.write_trace,
            record_shapes=True,  # of what is sent, too
        )
        straggler, milliseconds = run["straggler"] or (None, 0)
        self.delay = milliseconds / 1000 if straggler == dist.get_rank() else 0
        is_ahead = dist.get_rank() == dist.get_world_size() - 1
        self.ahead_ns = int(1e6 * run.get("clock_ahead_ms", 0)) if is_ahead else 0
        self.steps_begun, self.is_new_step, self.device = 0, True, own_device()
        self.phase: Any = None  # what is recorded now, if anything is; so is the step
        self.step: Any = None
        self.model: Any = None  # a DDP, as soon as there is one
        self.found = {"trace": str(trace), "wall_ms": {}}

    def mark(self, phase: str | None) -> None:
        """From here on it is this phase, until the next mark."""
        if self.phase:
            self.phase.__exit__(None, None, None)
        self.phase = record_function(phase) if phase else None
        if self.phase:
            self.phase.__enter__()

    def begin_step(self) -> None:
        """End the step before; if the next one is to be profiled, start its clock."""
        if self.step:
            self._end_step()
        first, last = STEPS_BEFORE + 2, STEPS_BEFORE + 1 + self.run["steps"]
        self.steps_begun += 1
        self.bar.update()
        if self.steps_begun == 1:
            self.profiler.start()
        elif self.steps_begun <= last + 1:
            self.profiler.step()
        if self.steps_begun == first:
            self.found["clock_ahead_ns"] = self._compare_clocks()
        elif self.steps_begun == last + 1:
            self.profiler.stop()
            self._describe()
        if first <= self.steps_begun <= last:
            self.step = record_function(f"step {self.steps_begun}")
            self.started_at = time.perf_counter()
            self.step.__enter__()

    def begin_forward(self, module: torch.nn.Module, inputs: tuple) -> None:
        """Begin a forward pass: DDP calls this first."""
        if module.training:
            self.mark("forward")
            if self.is_new_step:
                time.sleep(self.delay)

    def write_trace(self, profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(str(self.trace))
        if self.ahead_ns:
            merge.shift(self.trace, self.ahead_ns)

    def _end_step(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()  # so that what it computes is inside the step too
        self.step.__exit__(None, None, None)
        milliseconds = 1000 * (time.perf_counter() - self.started_at)
        self.found["wall_ms"][self.steps_begun] = milliseconds
        self.step = None

    def _compare_clocks(self) -> int:
        """Nanoseconds by which this clock is ahead of rank 0's. Then all meet, several times."""

        def clock() -> int:
            return time.time_ns() + self.ahead_ns

        nanoseconds = merge.clock_ahead(self.clocks, clock)
        for _ in range(BARRIERS):
            with record_function("barrier"):
                dist.barrier(self.clocks)
        return nanoseconds

    def _describe(self) -> None:
        sizes = []  # for one process too Accelerate makes a DDP, which sends nothing
        if dist.get_world_size() > 1:
            data = self.model._get_ddp_logging_data()
            sizes = (data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]).split(",")
        self.found |= {
            "rank": dist.get_rank(),
            "processes": dist.get_world_size(),
            "backend": dist.get_backend(),
            "device": self.device.type,
            "bucket_bytes": [int(size) for size in sizes],
        }
