"""Reproduce each reason why DDP can be slower than one process, and measure how much a fix helps.

python -m accel_demo.lab.scaling.reasons
python -m accel_demo.lab.scaling.reasons --quick --json reasons.json

Two connected processes train a small dense model with each method in turn. We compare methods
that differ in a single change, so the difference between their times is the effect of that change.
The measurements answer the question in an open issue:
https://github.com/pytorch/pytorch/issues/73600
"""

import dataclasses
import os
import statistics
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from tqdm import tqdm

from accel_demo.anatomy.devices import usable_cores
from accel_demo.errors import one_line_errors
from accel_demo.lab.measurements import median_interval
from accel_demo.lab.output import write_json
from accel_demo.lab.scaling import trainings
from accel_demo.lab.scaling.trainings import BATCH, LARGE, LATE, MICRO_BATCHES, SMALL
from accel_demo.options import Parser
from accel_demo.processes import group
from accel_demo.show import table
from accel_demo.wording import counted, duration

REPEATS, QUICK_REPEATS = 9, 1
STEPS, QUICK_STEPS = 6, 2  # optimizer steps per measurement
PROCESSES = 2


@dataclass(frozen=True)
class ReasonsResult:
    """Measurements of one rank. After `combine`, the step times are those of the slowest rank."""

    repeats: int
    processes: int
    threads: int  # per process
    device: str
    backend: str
    seconds_to_first_step: float
    first_steps_ms: list[float]
    megabytes: float  # total size of the gradients
    ms_per_step: dict[str, list[float]]  # for each method, one value per repetition
    straggler_ms_by_rank: list[float]  # median step time of each rank when rank 1 is late


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(__doc__, prog="python -m accel_demo.lab.scaling.reasons")
    parser.add_quick(f"{QUICK_REPEATS} repeat")
    parser.add_json()
    options = parser.parse_args(arguments)
    repeats, steps = (QUICK_REPEATS, QUICK_STEPS) if options.quick else (REPEATS, STEPS)
    threads = max(1, usable_cores() // PROCESSES)
    # Suppress torch's C++ warning that find_unused_parameters found no unused parameters.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    call = (measure, PROCESSES, repeats, steps, time.time())
    result = combine(group.results_by_rank(*call, threads=threads))
    print(
        f"{result.processes} connected processes on {result.device} ({result.backend}), "
        f"{counted(threads, 'thread')} each, {BATCH} images per process and per step; "
        f"ms per step, medians of {counted(repeats, 'interleaved repeat')} "
        f"(× 90 % interval for the ratio)\n"
    )
    head = ["reason", "how you see it", "what helps", "measured here"]
    print(table(head, reason_rows(result)))
    if options.json:
        write_json(options.json, "scaling.reasons", result)
    return 0


def measure(device: torch.device, repeats: int, steps: int, started_at: float) -> ReasonsResult:
    """Measure every method on this rank. `started_at` is the Unix time of the launch."""
    first = trainings.TrainingMethod(device)
    seconds = [trainings.seconds_per_call(first.step, 1, device) for _ in range(4)]
    seconds_to_first_step = time.time() - started_at - sum(seconds[1:])
    methods = trainings.make_methods(device)
    for method in methods.values():  # warm-up: DDP rebuilds its buckets after the first step
        trainings.seconds_per_step(method, 3, device)
    ms_per_step: dict[str, list[float]] = {name: [] for name in methods}
    for repeat in tqdm(range(repeats), desc="reasons", unit="repeat", disable=dist.get_rank() > 0):
        for name in list(methods)[:: 1 if repeat % 2 else -1]:
            mean = trainings.seconds_per_step(methods[name], steps, device)
            ms_per_step[name].append(1000 * mean)
    return ReasonsResult(
        repeats=repeats,
        processes=dist.get_world_size(),
        threads=torch.get_num_threads(),
        device=device.type,
        backend=dist.get_backend(),
        seconds_to_first_step=seconds_to_first_step,
        first_steps_ms=[1000 * step for step in seconds],
        megabytes=sum(p.numel() * p.element_size() for p in first.model.parameters()) / 1e6,
        ms_per_step=ms_per_step,
        straggler_ms_by_rank=[statistics.median(ms_per_step["straggler"])],
    )


def combine(by_rank: list[ReasonsResult]) -> ReasonsResult:
    """Combine the results of all ranks. The step times are those of the slowest rank."""
    first = by_rank[0]
    return dataclasses.replace(
        first,
        seconds_to_first_step=max(result.seconds_to_first_step for result in by_rank),
        ms_per_step={
            name: [max(ms) for ms in zip(*(r.ms_per_step[name] for r in by_rank), strict=True)]
            for name in first.ms_per_step
        },
        straggler_ms_by_rank=[result.straggler_ms_by_rank[0] for result in by_rank],
    )


def reason_rows(result: ReasonsResult) -> list[tuple[str, ...]]:
    """Return one row per reason: name, symptom, fix and measured effect."""
    ms = {name: statistics.median(values) for name, values in result.ms_per_step.items()}
    first, *_, later = result.first_steps_ms
    start, megabytes = result.seconds_to_first_step, result.megabytes

    def speedup(alone: str, name: str) -> str:
        return f"{result.processes * ms[alone] / ms[name]:.2f}"

    def change(before: str, after: str) -> str:
        pairs = zip(result.ms_per_step[before], result.ms_per_step[after], strict=True)
        ratios = median_interval([new / old for old, new in pairs])
        interval = f" (× {ratios[0]:.2f} – {ratios[1]:.2f})" if ratios else ""
        return f"{ms[before]:.1f} → {ms[after]:.1f} ms{interval}"

    by_rank = [f"{value:.0f} ms" for value in result.straggler_ms_by_rank]
    rows = [
        (
            "more to send than to compute",
            "the all-reduce continues long after backward",
            "a larger batch per process",
            f"images/s against one process: batch {SMALL} "
            f"{speedup('one process, small batch', 'small batch')} ×, batch {LARGE} "
            f"{speedup('one process, large batch', 'large batch')} ×",
        ),
        (
            "all-reduce in every micro-batch",
            "as many all-reduces as backward passes",
            "`no_sync` for all but the last; `accumulate`",
            f"{MICRO_BATCHES} × {SMALL} images: {change('share every micro-batch', 'no_sync')}",
        ),
        (
            "no overlap: one big bucket",
            "the all-reduce starts when backward ends",
            "a smaller `bucket_cap_mb`",
            f"one bucket → 1 MB: {change('one bucket', 'small buckets')}",
        ),
        (
            "the first step",
            "only step 1 is slow: it allocates memory, and buckets are not rebuilt yet",
            "exclude it from measurements",
            f"step 1 {first:.0f} ms, step 4 {later:.0f} ms",
        ),
        (
            "many bytes on a slow link",
            "the time of the all-reduce is bytes / bandwidth",
            "`bf16_compress_hook`",
            f"{megabytes:.1f} → {megabytes / 2:.1f} MB: {change('DDP', 'bf16 hook')}",
        ),
        (
            "gradients copied into buckets and back",
            "a copy before and after each all-reduce; each gradient is stored twice",
            "`gradient_as_bucket_view=True`",
            change("DDP", "gradient_as_bucket_view"),
        ),
        (
            "a search for unused parameters",
            "time between forward and backward; torch warns when none are unused",
            "`find_unused_parameters` only if some are unused",
            f"search → none: {change('find_unused_parameters', 'DDP')}",
        ),
        (
            "buffers sent in every forward",
            "a broadcast before each forward (BatchNorm)",
            "`forward_sync_buffers=False` (before torch 2.13: `broadcast_buffers=False`)",
            change("DDP", "no buffers"),
        ),
        (
            "too many threads",
            "more threads than cores; the load average is above the cores",
            "`OMP_NUM_THREADS` = cores / processes",
            f"one thread per core in each → cores / processes: {change('all threads', 'DDP')}",
        ),
        (
            "a straggler",
            "it waits least in the all-reduce, all other ranks wait long",
            "equal work, equal devices",
            f"{1000 * LATE:.0f} ms late on rank 1: {' and '.join(by_rank)} on ranks 0 and 1, "
            f"without the delay {ms['DDP']:.0f} ms",
        ),
        (
            "waiting for data",
            "data wait before each forward",
            "prepare once, `num_workers`, cheaper transforms",
            f"Python in the loop → prepared: {change('Python in the loop', 'DDP')}",
        ),
        (
            "start-up",
            "seconds before the first step, once per run",
            "longer runs; measure steps, not commands",
            f"{duration(start)} to step 1, as long as {1000 * start / ms['DDP']:,.0f} steps",
        ),
    ]
    if "half of the cores" in ms:
        crowded = (
            "processes share cores",
            "each process gets less than one core",
            "at most as many processes as cores (or GPUs)",
            f"half of the cores for both → all: {change('half of the cores', 'DDP')}",
        )
        rows.insert(8, crowded)
    return rows


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main())
