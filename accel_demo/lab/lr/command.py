"""Train with several rules for adapting a script to N processes, and compare the losses.

accel-demo lr --plot lr.svg
accel-demo lr --processes 1,2,4 --samples 4096

If a script runs on N processes instead of one, its global batch, its learning rate and the length
of its schedule can change. Each row of the table is a training run with one rule for these
settings. All runs train on the same images once. Each loss is compared with the loss of the
single-process run after the same number of images. On one process, all rules are equivalent.
Several seeds, with different weights and orders, show whether a difference is more than chance.
"""

from accel_demo.config import TrainConfig
from accel_demo.errors import UserError
from accel_demo.lab.lr import tables
from accel_demo.lab.lr.result import LearningRateResult
from accel_demo.lab.lr.rules import BATCH, LOSSES
from accel_demo.lab.output import write_outputs
from accel_demo.options import Parser, command_parser
from accel_demo.slow_imports import without_garbage_collection
from accel_demo.terminal import display, reflowed
from accel_demo.wording import counted

SAMPLES, QUICK_SAMPLES = 2048, 1024
SEEDS, QUICK_SEEDS = 9, 1
LEARNING_RATE = 0.01  # low enough for the linear rule to hold: see `LearningRateRow`


def main(arguments: list[str]) -> int:
    options = make_parser().parse_args(arguments)
    counts, samples, seeds = sorted({1, *options.processes}), options.samples, options.seeds
    check(counts, samples, options.learning_rate)
    with without_garbage_collection():
        from accel_demo.lab.lr.comparison import compare_rules

    rows = compare_rules(counts, samples, options.learning_rate, seeds)
    *fewer, most = counts
    connected = f"{', '.join(map(str, fewer))} and {most} connected processes"
    display(
        f"{connected}; every run sees the same {samples} images once; {counted(seeds, 'seed')}\n"
    )
    display(tables.text(rows))
    display(reflowed(tables.LEGEND))
    write_outputs(options, "lr", LearningRateResult(samples, seeds, rows), tables.draw)
    return 0


def make_parser() -> Parser:
    parser = command_parser("lr", __doc__, quick=f"train on {QUICK_SAMPLES} images, with one seed")
    parser.add_process_counts("process counts to compare with one process")
    parser.add_option("--samples", SAMPLES, "training images, each used once", quick=QUICK_SAMPLES)
    parser.add_option("--learning-rate", LEARNING_RATE, "peak learning rate on one process")
    help = "how many seeds to train with"
    parser.add_option("--seeds", SEEDS, help, quick=QUICK_SEEDS, least=1, most=1000)
    return parser


def check(counts: list[int], samples: int, learning_rate: float) -> None:
    """Raise `UserError` unless all runs can record losses after the same numbers of images."""
    if counts == [1]:
        raise UserError("--processes 1 leaves nothing to compare. Use 1,2.")
    for count in counts:
        if BATCH % count:
            raise UserError(f"--processes must divide the batch of {BATCH} images, got {count}")
    unit = LOSSES * BATCH * counts[-1]
    if samples < unit or samples % unit:
        raise UserError(
            f"--samples must be a multiple of {unit} for {counts[-1]} processes, got {samples}"
        )
    TrainConfig(train_samples=samples, learning_rate=learning_rate)
