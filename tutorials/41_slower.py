"""Measure reasons why DDP can be slower than one process, and how much a fix helps.

python tutorials/41_slower.py
python tutorials/41_slower.py --quick --json slower.json

Two connected processes train a small dense model with each method in turn. We compare methods
that differ in a single change, so the difference between their times is the effect of that change.
The measurements answer the question in an open issue:
https://github.com/pytorch/pytorch/issues/73600
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from accel_demo.anatomy.devices import usable_cores
from accel_demo.errors import one_line_errors
from accel_demo.lab import load
from accel_demo.lab.measurements import median_interval
from accel_demo.lab.output import warn, write_json
from accel_demo.options import Parser
from accel_demo.processes.connect import gather_objects
from accel_demo.processes.group import results_by_rank
from accel_demo.show import table
from accel_demo.wording import counted, duration

REPEATS, QUICK_REPEATS = 9, 1
STEPS, QUICK_STEPS = 6, 2  # optimizer steps per measurement
PROCESSES = 2
BATCH, SMALL, LARGE, MICRO_BATCHES = 64, 8, 512, 8
LATE = 0.020  # seconds that the straggler sleeps in each step


@dataclass(frozen=True)
class ReasonsResult:
    """Settings and measurements. The step times are those of the slowest rank."""

    repeats: int
    processes: int
    threads: int  # per process
    device: str
    backend: str
    seconds_to_first_step: float
    first_steps_ms: list[float]  # on rank 0
    ms_per_step: dict[str, list[float]]  # for each method, one value per repetition
    straggler_ms_by_rank: list[float]  # median step time of each rank when rank 1 is late


def main(options) -> None:
    load.begin()
    repeats, steps = (QUICK_REPEATS, QUICK_STEPS) if options.quick else (REPEATS, STEPS)
    threads = max(1, usable_cores() // PROCESSES)
    # Suppress torch's C++ warning that find_unused_parameters found no unused parameters.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    call = (measure, PROCESSES, repeats, steps, time.time())
    result, *_ = results_by_rank(*call, threads=threads)
    print(
        f"{result.processes} connected processes on {result.device} ({result.backend}), "
        f"{counted(threads, 'thread')} each, {BATCH} images per process and per step; "
        f"ms per step, medians of {counted(repeats, 'interleaved repeat')} "
        f"(in brackets: the 90 % interval of the speed-up, or of the ratio)\n"
    )
    head = ["reason", "what helps", "ms per step, before → after"]
    print(table(head, reason_rows(result)))
    warn("slower")
    if options.json:
        write_json(options.json, "slower", result)


def measure(device: torch.device, repeats: int, steps: int, started_at: float) -> ReasonsResult:
    """Measure every method. `started_at` is the Unix time of the launch."""
    first = TrainingMethod(device)
    seconds = [seconds_per_call(first.step, 1, device) for _ in range(4)]
    seconds_to_first_step = time.time() - started_at - sum(seconds[1:])
    methods = make_methods(device)
    for method in methods.values():  # warm-up: DDP rebuilds its buckets after the first step
        seconds_per_step(method, 3, device)
    own_ms = {name: [] for name in methods}
    disable = None if dist.get_rank() == 0 else True  # None: a bar on a terminal only
    for repeat in tqdm(range(repeats), desc="slower", unit="repeat", disable=disable):
        for name in list(methods)[:: 1 if repeat % 2 else -1]:
            own_ms[name].append(1000 * seconds_per_step(methods[name], steps, device))
    by_rank = gather_objects(own_ms)
    return ReasonsResult(
        repeats=repeats,
        processes=dist.get_world_size(),
        threads=torch.get_num_threads(),
        device=device.type,
        backend=dist.get_backend(),
        seconds_to_first_step=max(gather_objects(seconds_to_first_step)),
        first_steps_ms=[1000 * step for step in seconds],
        ms_per_step={
            name: [max(ranks) for ranks in zip(*(ms[name] for ms in by_rank), strict=True)]
            for name in methods
        },
        straggler_ms_by_rank=[statistics.median(ms["straggler"]) for ms in by_rank],
    )


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
        "straggler": TrainingMethod(device, before=sleep_on_rank_1),
        "all threads": TrainingMethod(device, around=with_threads),
    }
    if hasattr(os, "sched_setaffinity") and usable_cores() > 1:  # Linux only
        methods["half of the cores"] = TrainingMethod(device, around=on_half_of_the_cores)
    return methods


class TrainingMethod:
    """A replica of the model, a batch, and one change to the training step.

    If `is_alone` is true, only rank 0 trains, without DDP. `before` is called before each step, and
    `around` returns a context manager in which the steps run.
    """

    def __init__(
        self,
        device: torch.device,
        is_alone: bool = False,
        batch: int = BATCH,
        micro_batches: int = 1,
        no_sync: bool = False,
        before: Callable = lambda: None,
        around: Callable = nullcontext,
    ):
        torch.manual_seed(0)
        self.is_alone, self.before, self.around = is_alone, before, around
        self.micro_batches, self.no_sync = micro_batches, no_sync
        self.images = torch.randn(batch, 784, device=device)
        self.labels = torch.randint(10, (batch,), device=device)
        self.model = dense_model().to(device)
        if not is_alone:
            ids = None if device.type == "cpu" else [device.index]
            self.model = DistributedDataParallel(self.model, device_ids=ids)
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
    layers = []
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


def reason_rows(result: ReasonsResult) -> list[tuple[str, ...]]:
    """Return one row per reason: name, fix and measured effect."""
    ms = {name: statistics.median(values) for name, values in result.ms_per_step.items()}
    first, *_, later = result.first_steps_ms
    start = result.seconds_to_first_step

    def ratios(above: str, below: str) -> list[float]:
        pairs = zip(result.ms_per_step[above], result.ms_per_step[below], strict=True)
        return [numerator / denominator for numerator, denominator in pairs]

    def interval(values: list[float], sign: str = "") -> str:
        ends = median_interval(values)
        return f" ({sign}{ends[0]:.2f} – {ends[1]:.2f})" if ends else ""

    def speedup(alone: str, name: str, images: int) -> str:
        values = [result.processes * ratio for ratio in ratios(alone, name)]
        return f"{statistics.median(values):.2f}{interval(values)} with {images} images"

    def change(before: str, after: str) -> str:
        return f"{ms[before]:.1f} → {ms[after]:.1f}{interval(ratios(after, before), '× ')}"

    by_rank = [f"{value:.0f}" for value in result.straggler_ms_by_rank]
    rows = [
        (
            "more to send than to compute",
            "a larger batch per process",
            f"speed-up {speedup('one process, small batch', 'small batch', SMALL)}, "
            f"{speedup('one process, large batch', 'large batch', LARGE)}",
        ),
        (
            "all-reduce in every micro-batch",
            "`no_sync` or `accumulate`",
            change("share every micro-batch", "no_sync"),
        ),
        (
            "more threads than cores",
            "fewer: `OMP_NUM_THREADS`",
            change("all threads", "DDP"),
        ),
        (
            "a straggler",
            "equal work, equal devices",
            f"{' and '.join(by_rank)} by rank → {ms['DDP']:.0f}",
        ),
        (
            "the first step",
            "leave it out of measurements",
            f"{first:.0f} (step 1) → {later:.0f} (step 4)",
        ),
        (
            "start-up",
            "longer runs",
            f"{duration(start)} to step 1, as long as {1000 * start / ms['DDP']:,.0f} steps",
        ),
    ]
    if "half of the cores" in ms:
        crowded = ("processes share cores", "a core each", change("half of the cores", "DDP"))
        rows.insert(3, crowded)
    return rows


if __name__ == "__main__":
    with one_line_errors():
        parser = Parser(__doc__)
        parser.add_quick(f"{QUICK_REPEATS} repeat")
        parser.add_json()
        main(parser.parse_args())
