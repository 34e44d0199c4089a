"""Compare one process with several, step by step: your script, or our four training loops.

accel-demo parity -- torchrun --nproc-per-node 2 train.py --batch-size 16
accel-demo parity --processes 1,2,3 --model tiny_cnn

With a script, or a command after --, it runs the script in several processes and in one, unchanged
and without GPUs, with the same global batch and the same seed, and names what differs first: the
samples, the loss, the gradients, the learning rate, the weights or a buffer. The batches are made
larger in the one process: by the observer, or with the flag that --batch-flag names.

Otherwise, it trains with each version of our training loop, and compares the weights bit by bit. On
one process, train.py is compared with train_plain.py, train_dp.py and train_ddp.py. On several
processes, it is compared with train_ddp.py, and with two runs of train.py on one process that have
the same global batch: one accumulates smaller batches, the other uses one large batch. All runs
read the same samples in the same order, and cuDNN is deterministic. The exit code is 1 if the
weights of any two runs differ by more than the table promises.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

from accel_demo.config import MODELS, OPTIMIZERS, TrainConfig
from accel_demo.errors import UserError
from accel_demo.lab.observed.observation import (
    YOURS,
    add_options,
    add_processes,
    is_about_a_script,
    read_command,
    refuse_options,
)
from accel_demo.lab.output import write_outputs
from accel_demo.lab.parity import own, tables
from accel_demo.lab.parity.pairs import ParityResult, plan
from accel_demo.options import Parser, command_parser
from accel_demo.slow_imports import without_garbage_collection
from accel_demo.terminal import display

STEPS, QUICK_STEPS = 8, 4
PEAK_LEARNING_RATE = {"sgd": 0.1, "adamw": 0.01, "adam": 0.01}


OURS = "our training loops"


def main(arguments: list[str]) -> int:
    """Print how much the runs differ. Return 1 if that is more than promised, otherwise 0."""
    if is_about_a_script(arguments):
        return main_of_script(arguments)
    options, config = read(arguments)
    with without_garbage_collection():
        from accel_demo.lab.parity.comparison import compare_pairs
        from accel_demo.lab.parity.runs import train_all

    check_samples(options, config)
    pairs = plan(options.processes, options.batch_size)
    runs = dict.fromkeys(run for pair in pairs for run in (pair.first, pair.second))  # unique runs
    with tempfile.TemporaryDirectory() as folder:
        environments = train_all([*runs], config, Path(folder))
        rows = compare_pairs(pairs, config, environments, Path(folder))
    result = ParityResult(config, environments[pairs[0].first]["device"], rows)
    display(tables.text(result))
    write_outputs(options, "parity", result, tables.draw)
    return int(bool(result.findings))


def main_of_script(arguments: list[str]) -> int:
    """Compare the reader's script in one process and in several."""
    parser = make_parser(of_script=True)
    options = read_command(parser, arguments, "parity")
    refuse_options(parser, arguments[: -len(options.command)], OURS)
    result = own.compare_script(options)
    display(own.as_text(result))
    write_outputs(options, "parity", result, tables.draw_own, of_script=True)
    return int(result.kind is not None)


def make_parser(of_script: bool = False) -> Parser:
    parser = command_parser("parity", __doc__, quick=f"train for {QUICK_STEPS} steps, not {STEPS}")
    if of_script:
        add_processes(parser)
    else:
        parser.add_process_counts("process counts to compare; for your script, one number")
    parser.add_option("--steps", STEPS, "optimizer steps in each run", quick=QUICK_STEPS, least=1)
    parser.begin_group(OURS)
    parser.add_option("--model", "small_cnn", "the model to train", choices=MODELS)
    help = "the optimizer; sgd keeps rounding errors small"
    parser.add_option("--optimizer", "sgd", help, choices=OPTIMIZERS)
    parser.add_option("--batch-size", 32, "samples per process and micro-batch")
    parser.begin_group(YOURS)
    add_options(parser)
    help = "the flag of its batch size, for example --batch-flag=--batch-size"
    parser.add_argument("--batch-flag", metavar="FLAG", help=help)
    return parser


def read(arguments: list[str]):
    """Return the options, and the settings that all runs have in common.

    The settings make the training set large enough that no run begins a second epoch. Raises
    `UserError` if the options are invalid.
    """
    parser = make_parser()
    options = parser.parse_args(arguments)
    refuse_options(parser, arguments, YOURS)
    config = TrainConfig(
        dataset="text" if options.model == "tiny_gpt" else TrainConfig.dataset,
        model=options.model,
        optimizer=options.optimizer,
        learning_rate=PEAK_LEARNING_RATE[options.optimizer],
        batch_size=options.batch_size,
        max_steps=options.steps,
        train_samples=options.steps * options.batch_size * max(options.processes),
        test_samples=100,
    )
    return options, config


def check_samples(options, config: TrainConfig) -> None:
    """Raise `UserError` if there are too few samples for all steps."""
    from accel_demo.data import load_datasets  # slow: imports torch

    train_set, _ = load_datasets(replace(config, train_samples=0))
    if config.train_samples > len(train_set):
        raise UserError(
            f"{options.steps} steps of {max(options.processes)} x {options.batch_size} "
            f"{config.sample}s need {config.train_samples} {config.sample}s, but there are only "
            f"{len(train_set)}. Use fewer --steps or a smaller --batch-size."
        )
