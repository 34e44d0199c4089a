"""Why DDP can be slower than one process: each reason made to happen, with what helps.

python -m accel_demo.lab.scaling.reasons

Two connected processes train a small dense network in each way, in turns. One way at a time has one
thing changed, so that its price can be read off. It answers the open request
https://github.com/pytorch/pytorch/issues/73600 by measurements.
"""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from tqdm import tqdm

from accel_demo.anatomy.devices import usable_cores
from accel_demo.errors import UserError, one_line_errors
from accel_demo.lab import flags
from accel_demo.lab.measurements import median_interval
from accel_demo.lab.scaling.trainings import (
    BATCH,
    LARGE,
    LATE,
    MICRO_BATCHES,
    SMALL,
    Training,
    make_ways,
    run,
    seconds,
)
from accel_demo.processes import group
from accel_demo.show import table
from accel_demo.wording import counted

REPEATS, QUICK_REPEATS = 9, 1
STEPS, QUICK_STEPS = 6, 2  # timed at a stretch
PROCESSES = 2


def main(arguments: list[str] | None = None) -> int:
    parser = flags.parser_of("scaling.reasons", __doc__, f"{QUICK_REPEATS} repeat", plot=False)
    help = f"how often every way is measured, in turns (default: {REPEATS})"
    parser.add_argument("--repeats", type=int, metavar="N", help=help)
    parser.prog = "python -m accel_demo.lab.scaling.reasons"
    parser.set_defaults(plot=None)
    options = flags.read(parser, sys.argv[1:] if arguments is None else arguments)
    repeats = options.repeats
    if repeats is None:
        repeats = QUICK_REPEATS if options.quick else REPEATS
    if repeats < 1:
        raise UserError(f"--repeats must be at least 1, got {repeats}")
    steps = QUICK_STEPS if options.quick else STEPS
    threads = max(1, usable_cores() // PROCESSES)
    # Each rank's torch would warn in C++ that find_unused_parameters finds none: it is a row here.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    found = together(
        group.results_by_rank(measure, PROCESSES, repeats, steps, time.time(), threads=threads)
    )
    print(
        f"{found['processes']} connected processes on {found['device']} ({found['backend']}), "
        f"{counted(threads, 'thread')} each, {BATCH} images per process and step; "
        f"ms per step, medians of {counted(repeats, 'repeat')} in turns "
        f"(× 90 % interval of the ratio)\n"
    )
    print(table(["reason", "how you see it", "what helps", "measured here"], rows_of(found)))
    if options.json:
        flags.write_json(options.json, {"repeats": repeats, "threads": threads, **found})
    return 0


def measure(device: torch.device, repeats: int, steps: int, started_at: float) -> dict:
    """Milliseconds per optimizer step of every way on this rank, one per repeat.

    `started_at` is when the launch began, in seconds of the wall clock.
    """
    first = Training(device)
    first_steps = [1000 * seconds(first.step, 1, device) for _ in range(4)]
    to_first_step = time.time() - started_at - sum(first_steps[1:]) / 1000
    ways = make_ways(device)
    for way in ways.values():
        run(way, 3, device)  # buckets are rebuilt after the first step
    found: dict[str, list[float]] = {name: [] for name in ways}
    turns = tqdm(range(repeats), desc="reasons", unit="repeat", disable=dist.get_rank() > 0)
    for repeat in turns:
        names = list(ways)
        for name in names if repeat % 2 else names[::-1]:
            found[name].append(1000 * run(ways[name], steps, device))
    return {
        "processes": dist.get_world_size(),
        "device": device.type,
        "backend": dist.get_backend(),
        "to_first_step": to_first_step,
        "first_steps": first_steps,
        "megabytes": sum(p.numel() * p.element_size() for p in first.model.parameters()) / 1e6,
        "ms_per_step": found,
    }


def together(found: list[dict]) -> dict:
    """What all ranks found as one: each step took as long as on the rank where it took longest."""
    one = dict(found[0])
    one["to_first_step"] = max(each["to_first_step"] for each in found)
    one["ms_per_step"] = {
        name: [max(values) for values in zip(*(e["ms_per_step"][name] for e in found), strict=True)]
        for name in found[0]["ms_per_step"]
    }
    one["ms_by_rank"] = {
        name: [statistics.median(each["ms_per_step"][name]) for each in found]
        for name in ("DDP", "straggler")
    }
    return one


def rows_of(found: dict) -> list[list[str]]:
    """The reasons: how to see each, what helps, and both measured."""
    ms = {name: statistics.median(values) for name, values in found["ms_per_step"].items()}
    first, *_, later = found["first_steps"]
    start, megabytes = found["to_first_step"], found["megabytes"]

    def times_one(alone: str, name: str) -> str:
        return f"{found['processes'] * ms[alone] / ms[name]:.2f}"

    def change(before: str, after: str) -> str:
        pairs = zip(found["ms_per_step"][before], found["ms_per_step"][after], strict=True)
        ratios = median_interval([second / first for first, second in pairs])
        interval = f" (× {ratios[0]:.2f} – {ratios[1]:.2f})" if ratios else ""
        return f"{ms[before]:.1f} → {ms[after]:.1f} ms{interval}"

    by_rank = [f"{value:.0f} ms" for value in found["ms_by_rank"]["straggler"]]
    rows = [
        (
            "more to send than to compute",
            "the all-reduce goes on long after backward",
            "a larger batch per process",
            f"images/s against one process: batch {SMALL} "
            f"{times_one('one process, small batch', 'small batch')} ×, batch {LARGE} "
            f"{times_one('one process, large batch', 'large batch')} ×",
        ),
        (
            "sharing in every micro-batch",
            "as many all-reduces as backwards",
            "`no_sync` for all but the last; `accumulate`",
            f"{MICRO_BATCHES} × {SMALL} images: {change('share every micro-batch', 'no_sync')}",
        ),
        (
            "no overlap: one big bucket",
            "the all-reduce starts where backward ends",
            "a smaller `bucket_cap_mb`",
            f"one bucket → 1 MB: {change('one bucket', 'small buckets')}",
        ),
        (
            "the first step",
            "only step 1 is slow: memory is new, buckets are not yet laid anew",
            "leave it out when you measure",
            f"step 1 {first:.0f} ms, step 4 {later:.0f} ms",
        ),
        (
            "many bytes on a slow link",
            "the all-reduce takes as long as its bytes need on the link",
            "`bf16_compress_hook`",
            f"{megabytes:.1f} → {megabytes / 2:.1f} MB: {change('DDP', 'bf16 hook')}",
        ),
        (
            "gradients copied into buckets and back",
            "`copy_` beside each all-reduce; each gradient is there twice",
            "`gradient_as_bucket_view=True`",
            change("DDP", "gradient_as_bucket_view"),
        ),
        (
            "a search for unused parameters",
            "time between forward and backward; torch warns when none are unused",
            "`find_unused_parameters` only where some are unused",
            f"with → without: {change('find_unused_parameters', 'DDP')}",
        ),
        (
            "buffers sent in every forward",
            "a broadcast before each forward (BatchNorm)",
            "`forward_sync_buffers=False` (`broadcast_buffers` before torch 2.15)",
            change("DDP", "no buffers"),
        ),
        (
            "too many threads",
            "more threads than cores; the load is above them",
            "`OMP_NUM_THREADS` = cores / processes",
            f"all cores each → a share each: {change('all threads', 'DDP')}",
        ),
        (
            "a straggler",
            "it waits least in the all-reduce, all others long",
            "equal work, equal devices",
            f"{1000 * LATE:.0f} ms late on rank 1: {' and '.join(by_rank)} on ranks 0 and 1, "
            f"without it {ms['DDP']:.0f} ms",
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
            f"{start:.1f} s to the first step: {1000 * start / ms['DDP']:,.0f} steps' worth",
        ),
    ]
    if "half of the cores" in ms:
        crowded = (
            "processes share cores",
            "each gets less than one core",
            "no more processes than cores (or GPUs)",
            f"half of the cores for both → all: {change('half of the cores', 'DDP')}",
        )
        rows.insert(8, crowded)
    return [list(row) for row in rows]


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main())
