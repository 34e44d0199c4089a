"""One rank of the profiled run: train.py as people run it, with a mark where each phase begins.

`train.main` finds a `MarkedAccelerator` in place of its `Accelerator`; nothing in it knows.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedDataParallelKwargs, ProfileKwargs
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function
from torch.utils.data import DataLoader
from tqdm import tqdm

from accel_demo import train
from accel_demo.config import TrainConfig
from accel_demo.lab import timeline_merge

STEPS_BEFORE = 3  # not profiled: in the first ones DDP lays its buckets anew, and memory is taken
STEPS_AROUND = STEPS_BEFORE + 2  # and a warm-up of the profiler, and a last one, which is logged
BARRIERS = 20  # marked in the trace before the first profiled step: all ranks see each of them


def profile_runs(device: torch.device, runs: list[dict], folder: str) -> list[dict]:
    """Train once for each of `runs`, and profile some steps: what this rank found, run by run.

    A run is {"choices": fields of TrainConfig, "steps": how many to profile, "bucket_mb",
    "straggler": None or [rank, milliseconds]}. With "clock_ahead_ms" the last rank's clock, and
    with it its trace, goes that far ahead, as another machine's may. All are to call this together.
    """
    clocks = dist.new_group(backend="gloo")  # clocks are read on the CPU, whatever trains
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
    train.Accelerator = partial(MarkedAccelerator, recording)
    try:
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
        ):
            train.main(config)
    finally:
        train.Accelerator = Accelerator
    AcceleratorState._reset_state(reset_partial_state=True)  # the next run makes its own
    GradientState._reset_state()
    return recording.found


class MarkedAccelerator(Accelerator):
    """An `Accelerator` that tells a `Recording` where the phases of a step begin.

    "data wait" is a request for a batch; "forward" goes on until `backward` is called, so it has
    the loss in it; "optimizer" lasts from there to the end of the block under `accumulate`.
    """

    def __init__(self, recording: "Recording", **options):
        handlers = [
            ProfileKwargs(
                schedule_option=recording.schedule,
                on_trace_ready=recording.write_trace,
                record_shapes=True,  # of what is sent, too
            ),
            DistributedDataParallelKwargs(bucket_cap_mb=recording.run["bucket_mb"]),
        ]
        super().__init__(kwargs_handlers=handlers, **options)
        self.recording = recording

    def prepare(self, *arguments, **options):
        prepared = super().prepare(*arguments, **options)
        if isinstance(arguments[0], DataLoader):  # the train set's comes first
            return (MarkedLoader(prepared[0], self), *prepared[1:])
        prepared[0].register_forward_pre_hook(self.recording.begin_forward)
        self.recording.model = prepared[0]
        return prepared

    @contextlib.contextmanager
    def accumulate(self, *models) -> Iterator[None]:
        with super().accumulate(*models):
            yield
        self.recording.mark(None)

    def backward(self, loss: torch.Tensor, **options) -> None:
        self.recording.mark("backward")
        super().backward(loss, **options)
        self.recording.mark("optimizer")

    def end_training(self) -> None:
        """Nothing: it would take down the process group, and another run may follow."""


class MarkedLoader:
    """A prepared loader with a mark around each request for a batch. Steps begin with one."""

    def __init__(self, loader: DataLoader, accelerator: MarkedAccelerator):
        self.loader, self.accelerator = loader, accelerator

    def __iter__(self) -> Iterator:
        batches, recording = iter(self.loader), self.accelerator.recording
        for number in range(len(self.loader)):
            recording.is_new_step = number % self.accelerator.gradient_accumulation_steps == 0
            if recording.is_new_step:
                recording.begin_step(self.accelerator)
            recording.mark("data wait")
            batch = next(batches)
            recording.mark(None)
            yield batch

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str):
        return getattr(self.loader, name)


class Recording:
    """The marks and the clock of one run: `found` is what this rank has to tell of it."""

    def __init__(self, run: dict, trace: Path, clocks: dist.ProcessGroup, bar: tqdm):
        self.run, self.trace, self.clocks, self.bar = run, trace, clocks, bar
        self.schedule = {"skip_first": STEPS_BEFORE, "wait": 0, "warmup": 1, "repeat": 1}
        self.schedule["active"] = run["steps"]
        straggler, milliseconds = run["straggler"] or (None, 0)
        self.delay = milliseconds / 1000 if straggler == dist.get_rank() else 0
        is_ahead = dist.get_rank() == dist.get_world_size() - 1
        self.ahead_ns = int(1e6 * run.get("clock_ahead_ms", 0)) if is_ahead else 0
        self.steps_begun, self.phase, self.step = 0, None, None
        self.is_new_step, self.model, self.profiling = True, None, contextlib.ExitStack()
        self.found = {"trace": str(trace), "wall_ms": {}}

    def mark(self, phase: str | None) -> None:
        """From here on it is this phase, until the next mark."""
        if self.phase:
            self.phase.__exit__(None, None, None)
        self.phase = record_function(phase) if phase else None
        if self.phase:
            self.phase.__enter__()

    def begin_step(self, accelerator: MarkedAccelerator) -> None:
        """The step before has ended; where the next one is to be profiled, start its clock."""
        if self.step:
            self._end_step(accelerator.device)
        first, last = STEPS_BEFORE + 2, STEPS_BEFORE + 1 + self.run["steps"]
        self.steps_begun += 1
        self.bar.update()
        if self.steps_begun == 1:
            self.profiler = self.profiling.enter_context(accelerator.profile())
        elif self.steps_begun <= last + 1:
            self.profiler.step()
        if self.steps_begun == first:
            self.found["clock_ahead_ns"] = self._compare_clocks()
        elif self.steps_begun == last + 1:
            self.profiling.close()
            self._describe(accelerator)
        if first <= self.steps_begun <= last:
            self.step = record_function(f"step {self.steps_begun}")
            self.started_at = time.perf_counter()
            self.step.__enter__()

    def begin_forward(self, module: torch.nn.Module, inputs: tuple) -> None:
        """A hook: DDP, or the model of a run on one process, is called."""
        if module.training:
            self.mark("forward")
            if self.is_new_step:
                time.sleep(self.delay)

    def write_trace(self, profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(str(self.trace))
        if self.ahead_ns:
            timeline_merge.shift(self.trace, self.ahead_ns)

    def _end_step(self, device: torch.device) -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize()  # so that what it computes is inside the step too
        self.step.__exit__(None, None, None)
        milliseconds = 1000 * (time.perf_counter() - self.started_at)
        self.found["wall_ms"][self.steps_begun] = milliseconds
        self.step = None

    def _compare_clocks(self) -> int:
        """Nanoseconds by which this clock is ahead of rank 0's. Then all meet, several times."""

        def clock() -> int:
            return time.time_ns() + self.ahead_ns

        nanoseconds = timeline_merge.clock_ahead(self.clocks, clock)
        for _ in range(BARRIERS):
            with record_function("barrier"):
                dist.barrier(self.clocks)
        return nanoseconds

    def _describe(self, accelerator: MarkedAccelerator) -> None:
        sizes = []  # of one process too Accelerate makes a DDP, which has nobody to send to
        if isinstance(self.model, DistributedDataParallel) and accelerator.num_processes > 1:
            data = self.model._get_ddp_logging_data()
            sizes = (data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]).split(",")
        self.found |= {
            "rank": accelerator.process_index,
            "processes": accelerator.num_processes,
            "backend": dist.get_backend(),
            "device": accelerator.device.type,
            "bucket_bytes": [int(size) for size in sizes],
        }
