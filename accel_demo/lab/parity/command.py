"""Train a few steps in every telling and compare the saved weights, to the last bit.

accel-demo parity
accel-demo parity --processes 1,2,3 --model tiny_cnn --markdown

Trained are train_plain.py, train_dp.py, train_ddp.py and train.py on one process; train_ddp.py and
train.py on several; and train.py on one process with the same global batch, accumulated or in one
piece. Every run reads the same images in the same order. Exits with 1 where two runs that promise
the same weights have others. On GPUs cuDNN is told to compute the same way each time.
"""

import tempfile
from pathlib import Path

from accel_demo.config import MODELS, OPTIMIZERS, TrainConfig
from accel_demo.data import check_batches, load_datasets
from accel_demo.errors import UserError
from accel_demo.lab import flags
from accel_demo.lab.parity import tables
from accel_demo.lab.parity.ledger import has_kept_its_promise, ledger, plan, runs_of
from accel_demo.lab.parity.runs import train_all

STEPS, QUICK_STEPS = 8, 4
# What the choices of a run are besides those that can be made here.
PEAK_LEARNING_RATE = {"sgd": 0.1, "adamw": 0.01, "adam": 0.01}
WEIGHT_DECAY = {"sgd": 5e-4, "adamw": 0.1, "adam": 5e-4}


def main(arguments: list[str]) -> int:
    options = read(arguments)
    choices, pairs = choices_of(options), plan(options.processes, options.batch_size)
    with tempfile.TemporaryDirectory() as folder:
        environments = train_all(runs_of(pairs), choices, Path(folder))
        rows = ledger(pairs, choices, environments, Path(folder))
    found = {**choices, "batch_size": options.batch_size, "rows": rows}
    found["device"] = next(iter(environments.values()))["device"]
    print(tables.markdown(found) if options.markdown else tables.text(found))
    if options.json:
        flags.write_json(options.json, found)
    if options.plot:
        tables.draw(found, options.plot)
    return 0 if all(map(has_kept_its_promise, rows)) else 1


def read(arguments: list[str]):
    """The options. Raises `UserError` for what could not be trained."""
    parser = flags.parser_of("parity", __doc__, quick=f"{QUICK_STEPS} steps instead of {STEPS}")
    help = "numbers of processes to compare at (default: 1,2)"
    parser.add_argument("--processes", default="1,2", metavar="N,N", help=help)
    help = f"optimizer steps of each run (default: {STEPS})"
    parser.add_argument("--steps", type=int, metavar="N", help=help)
    help = "the network to train (default: small_cnn)"
    parser.add_argument("--model", choices=MODELS, default="small_cnn", help=help)
    help = "how it is trained (default: sgd, whose rounding errors stay small)"
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd", help=help)
    help = "images per process and micro-batch (default: 32)"
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help=help)
    help = "print a Markdown table, for a page or a pull request"
    parser.add_argument("--markdown", action="store_true", help=help)
    options = flags.read(parser, arguments)
    options.processes = flags.process_counts(options.processes)
    if options.steps is None:
        options.steps = QUICK_STEPS if options.quick else STEPS
    if options.steps < 1:
        raise UserError(f"--steps must be at least 1, got {options.steps}")
    config = TrainConfig(**choices_of(options), batch_size=options.batch_size)
    train_set, _ = load_datasets(TrainConfig())
    if config.train_samples > len(train_set):
        raise UserError(
            f"{options.steps} steps with {max(options.processes)} x batch_size "
            f"{options.batch_size} take {config.train_samples} images, but there are "
            f"{len(train_set)}: choose fewer --steps or a smaller --batch-size"
        )
    check_batches(config, train_set, max(options.processes))
    return options


def choices_of(options) -> dict:
    """The fields of TrainConfig that all runs have in common. No run begins a second epoch."""
    return {
        "model": options.model,
        "optimizer": options.optimizer,
        "learning_rate": PEAK_LEARNING_RATE[options.optimizer],
        "weight_decay": WEIGHT_DECAY[options.optimizer],
        "max_steps": options.steps,
        "train_samples": options.steps * max(0, options.batch_size) * max(options.processes),
        "test_samples": 100,
    }
