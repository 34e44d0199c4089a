"""Show what uses the memory of a training step, in your script or in our models.

accel-demo memory -- torchrun --nproc-per-node 2 train.py
accel-demo memory --model resnet18 --optimizer sgd --plot memory.svg

With a script, or a command after --, it runs the script unchanged and without GPUs, ends it after a
few optimizer steps, and prints what each rank holds, and what each of N devices would hold with
DDP, ZeRO and FSDP2. Files that it overwrites are put back.

Otherwise, it compares predicted and measured memory of our models with nn.DataParallel, DDP and
FSDP2. "predicted" is calculated from tensor shapes alone. "counted" is the total size of the live
tensors in a training step. "measured" is the growth of the process's resident memory. On GPUs, it
is the growth of the memory that PyTorch has allocated. On the CPU, the devices of nn.DataParallel
cannot be measured separately, because they belong to the same process.
"""

from pathlib import Path

from accel_demo.config import IMAGE_MODELS
from accel_demo.errors import UserError
from accel_demo.guess import comparison
from accel_demo.lab.memory import own, tables
from accel_demo.lab.memory.formula import STATES
from accel_demo.lab.memory.result import MemoryResult
from accel_demo.lab.observed.observation import (
    YOURS,
    add_options,
    is_about_a_script,
    read_command,
    refuse_options,
)
from accel_demo.lab.output import write_outputs
from accel_demo.options import Parser, command_parser
from accel_demo.slow_imports import without_garbage_collection
from accel_demo.terminal import display

BATCH_SIZE, QUICK_BATCH_SIZE = 32, 2  # images per device
OPTIMIZER, QUICK_OPTIMIZER = "adamw", "sgd"


OURS = "our models"


def main(arguments: list[str]) -> int:
    if is_about_a_script(arguments):
        return main_of_script(arguments)
    options = read(arguments)
    with without_garbage_collection():
        from accel_demo.lab.memory.comparison import measure_and_predict

    result = measure_and_predict(
        options.model, options.optimizer, options.processes, options.batch_size
    )
    display(tables.text(result))
    if options.guess is not None:
        display(f"\n{comparison(options.guess, bytes_per_parameter(result), ' bytes')}")
    write_outputs(options, "memory", result, tables.draw)
    return 0


def main_of_script(arguments: list[str]) -> int:
    """Show the memory of the reader's script."""
    parser = make_parser()
    options = read_command(parser, arguments, "memory")
    refuse_options(parser, arguments[: -len(options.command)], OURS)
    if options.devices is not None and not 2 <= options.devices <= 100_000:
        raise UserError(f"--devices must be from 2 to 100000, got {options.devices}")
    result = own.measure_script(options)
    display(own.as_text(result))
    if options.guess is not None:
        display(f"\n{comparison(options.guess, own.bytes_per_parameter(result), ' bytes')}")
    write_outputs(options, "memory", result, tables.draw_own, of_script=True)
    return 0


def bytes_per_parameter(result: MemoryResult) -> float:
    """Return the counted bytes per parameter on rank 0 of DDP, without activations.

    If they were not counted, which needs one GPU per process, the predicted bytes are used.
    """
    row = next(row for row in result.rows if row.strategy == "DDP")
    sizes = row.counted or row.predicted
    return sum(size for kind, size in sizes.items() if kind != "activations") / result.parameters


def make_parser() -> Parser:
    quick = f"use {QUICK_BATCH_SIZE} images per device, not {BATCH_SIZE}, and {QUICK_OPTIMIZER}"
    parser = command_parser("memory", __doc__, quick=quick)
    parser.add_processes(2, "number of ranks (DDP, FSDP2) or devices (nn.DataParallel)")
    parser.add_guess("bytes per parameter on a rank of DDP, without activations")
    parser.begin_group(OURS)
    parser.add_option("--model", "vgg11", "the model to train", choices=IMAGE_MODELS)
    choices = {"quick": QUICK_OPTIMIZER, "choices": list(STATES)}
    parser.add_option("--optimizer", OPTIMIZER, "the optimizer", **choices)
    parser.add_option("--batch-size", BATCH_SIZE, "images per device", quick=QUICK_BATCH_SIZE)
    parser.begin_group(YOURS)
    add_options(parser)
    help = "number of devices for the formulas (default: its processes, at least 2)"
    parser.add_argument("--devices", type=int, metavar="N", help=help)
    help = "folder for the memory snapshot of each GPU (default: runs/memory)"
    folder = Path("runs/memory")
    parser.add_argument("--output", type=Path, default=folder, metavar="FOLDER", help=help)
    return parser


def read(arguments: list[str]):
    """Return the options. Raises `UserError` if --batch-size is too small for the model."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    refuse_options(parser, arguments, YOURS)
    least = 2 if options.model.startswith("resnet") else 1  # BatchNorm on 1×1 maps needs 2 images
    if options.batch_size < least:
        raise UserError(
            f"--batch-size must be at least {least} for {options.model}, got {options.batch_size}"
        )
    return options
