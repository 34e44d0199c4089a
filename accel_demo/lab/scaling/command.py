"""Measure how much faster training is with more processes: your script, or our training loops.

accel-demo scaling -- torchrun --nproc-per-node 2 train.py
accel-demo scaling --processes 1,2,4 --batch-size 512 --plot scaling.svg

With a script, or a command after --, it runs the script unchanged and without GPUs (--gpu keeps
them), several times in the processes that the command starts and in one, and ends each run after a
few optimizer steps. Files that it overwrites are put back. It prints the step times, and the
speed-up: how many times as many samples per second the processes train on together as one.

Otherwise, it trains with our own loops. Strong scaling splits one global batch among the processes.
Weak scaling gives each process a full batch. Speed-ups are relative to plain PyTorch in one
process. Each repetition measures all cases in random order, in the same worker processes. With at
least three process counts, it fits Amdahl's and Gustafson's laws. The last table compares two
threads with two processes, for work in Python and in torch. It shows the effect of the global
interpreter lock, which allows only one thread at a time to run Python code.
"""

import os

from accel_demo.config import IMAGE_MODELS, TrainConfig
from accel_demo.errors import UserError
from accel_demo.guess import comparison
from accel_demo.lab import hosts
from accel_demo.lab.observed.observation import (
    YOURS,
    add_options,
    add_processes,
    is_about_a_script,
    read_command,
    refuse_options,
)
from accel_demo.lab.output import write_outputs
from accel_demo.lab.scaling import own, tables
from accel_demo.lab.scaling.result import ScalingResult
from accel_demo.options import Parser, command_parser
from accel_demo.slow_imports import without_garbage_collection
from accel_demo.terminal import display

REPEATS, QUICK_REPEATS = 9, 2
STEPS, QUICK_STEPS = 20, 3  # optimizer steps per training run, including the warm-up
MOST_IMAGES = 1_000_000  # maximum size of the synthetic dataset
OWN_REPEATS, OWN_QUICK_REPEATS = 5, 1  # runs of the reader's script
OURS = "our training loops"


def main(arguments: list[str]) -> int:
    if is_about_a_script(arguments):
        return main_of_script(arguments)
    parser = make_parser()
    options = parser.parse_args(arguments)
    refuse_options(parser, arguments, YOURS)
    counts = sorted({1, *options.processes})
    steps = QUICK_STEPS if options.quick else STEPS
    check(options, counts, steps)
    with without_garbage_collection():
        from accel_demo.lab.scaling.measurement import measure

    result = measure(options, counts, steps)
    display(tables.text(result))
    if options.guess is not None:
        display(f"\n{comparison(options.guess, speedup_on_two(result), '×')}")
    write_outputs(options, "scaling", result, tables.draw)
    return 0


def main_of_script(arguments: list[str]) -> int:
    """Measure the speed-up of the reader's script."""
    parser = make_parser(of_script=True)
    options = read_command(parser, arguments, "scaling")
    refuse_options(parser, arguments[: -len(options.command)], OURS)
    result = own.measure_script(options)
    display(tables.text_of_script(result))
    if options.guess is not None:
        display(f"\n{comparison(options.guess, result.rows[1].median_speedup, '×')}")
    write_outputs(options, "scaling", result, tables.draw_own, of_script=True)
    return 0


def make_parser(of_script: bool = False) -> Parser:
    quick = f"{QUICK_REPEATS} repeats of {QUICK_STEPS} steps, or {OWN_QUICK_REPEATS} of your script"
    parser = command_parser("scaling", __doc__, quick)
    if of_script:
        add_processes(parser)
    else:
        help = "process counts to compare, and 1; for your script, one number"
        parser.add_process_counts(help)
    repeats = (OWN_REPEATS, OWN_QUICK_REPEATS) if of_script else (REPEATS, QUICK_REPEATS)
    help = f"how many times to measure each case; for your script, {OWN_REPEATS}"
    parser.add_option("--repeats", repeats[0], help, quick=repeats[1], least=1)
    help = "speed-up of 2 processes: of Accelerate with strong scaling, or of your script"
    parser.add_guess(help)
    parser.begin_group(OURS)
    parser.add_option("--threads", 1, "CPU threads per process", least=1)
    parser.add_option("--model", "small_cnn", "the model to train", choices=IMAGE_MODELS)
    help = "images per step: per process for weak scaling, in total for strong"
    parser.add_option("--batch-size", 128, help, least=1)
    hosts.add_rate(parser)
    parser.begin_group(YOURS)
    help = "optimizer steps to measure in each run"
    parser.add_option("--steps", own.MEASURED, help, least=own.LEAST_STEPS)
    add_options(parser)
    return parser


def check(options, counts: list[int], steps: int) -> None:
    """Check the options before any worker starts. Raises `UserError` if an option is invalid."""
    if options.guess is not None and 2 not in counts:
        raise UserError("--guess is for 2 processes: include 2 in --processes")
    if options.threads > 8 * (os.cpu_count() or 1):
        raise UserError(f"{options.threads} threads are too many for {os.cpu_count()} cores")
    for count in counts:
        if options.batch_size % count:
            message = f"--batch-size {options.batch_size} cannot be divided among {count} processes"
            raise UserError(f"{message}, as strong scaling requires")
    most = MOST_IMAGES // (steps * counts[-1])
    if options.batch_size > most:
        raise UserError(f"--batch-size must be at most {most} here, got {options.batch_size}")
    smallest = options.batch_size // counts[-1]
    if options.model.startswith("resnet") and smallest < 2:
        raise UserError(f"{options.model} needs batches of at least 2 images, got {smallest}")
    hosts.check_rate(options.rate, counts[-1], TrainConfig(model=options.model))


def speedup_on_two(result: ScalingResult) -> float:
    """Return the median speed-up of Accelerate on two processes, with strong scaling."""
    case = ("strong", "Accelerate", 2)
    [row] = [row for row in result.rows if (row.scaling, row.version, row.processes) == case]
    return row.median_speedup
