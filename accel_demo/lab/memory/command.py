"""Compare the predicted and measured memory of a training step: nn.DataParallel, DDP and FSDP2.

accel-demo memory
accel-demo memory --model resnet18 --optimizer sgd --plot memory.svg

"predicted" is calculated from tensor shapes alone. "counted" is the total size of the live tensors
in a training step. "measured" is the growth of the process's resident memory. On GPUs, it is the
growth of the memory that PyTorch has allocated. On the CPU, the devices of nn.DataParallel cannot
be measured separately, because they belong to the same process.
"""

from tqdm import tqdm

from accel_demo.anatomy import gil
from accel_demo.anatomy.memory import OPTIMIZERS
from accel_demo.config import MODELS
from accel_demo.errors import UserError
from accel_demo.guess import add_guess, comparison
from accel_demo.lab import flags
from accel_demo.lab.memory import tables
from accel_demo.lab.memory.formula import STRATEGIES
from accel_demo.lab.memory.measure import measure_each
from accel_demo.lab.memory.result import MemoryResult, memory_result
from accel_demo.processes.devices import own_device
from accel_demo.processes.group import PRELOADED, results_by_rank
from accel_demo.processes.launch import start_preloading

BATCH_SIZE, QUICK_BATCH_SIZE = 32, 2  # images per device
OPTIMIZER, QUICK_OPTIMIZER = "adamw", "sgd"


def main(arguments: list[str]) -> int:
    options = read(arguments)
    choices = (options.model, options.optimizer, options.processes, options.batch_size)
    data_parallel, *distributed = STRATEGIES
    with tqdm(total=len(STRATEGIES), desc="measuring", unit="strategy", leave=False) as bar:
        # Import torch for the other processes while this process measures nn.DataParallel.
        start_preloading(PRELOADED)
        with gil.one_torch_thread():
            here = measure_each(own_device(), [data_parallel], *choices)
        bar.update()
        ranks = results_by_rank(measure_each, options.processes, distributed, *choices)
        bar.update(len(distributed))
    result = memory_result(choices, here[data_parallel], ranks)
    print(tables.text(result))
    if options.guess is not None:
        print(f"\n{comparison(options.guess, bytes_per_parameter(result), ' bytes')}")
    if options.json:
        flags.write_json(options.json, "memory", result)
    if options.plot:
        tables.draw(result, options.plot)
    return 0


def bytes_per_parameter(result: MemoryResult) -> float:
    """Return the counted bytes per parameter on rank 0 of DDP, without activations.

    If they were not counted, which needs one GPU per process, the predicted bytes are used.
    """
    row = next(row for row in result.rows if row.strategy == "DDP")
    sizes = row.counted or row.predicted
    return sum(size for kind, size in sizes.items() if kind != "activations") / result.parameters


def read(arguments: list[str]):
    """Return the options. Raises `UserError` if --batch-size is too small for the model."""
    quick = f"use {QUICK_BATCH_SIZE} images per device, not {BATCH_SIZE}, and {QUICK_OPTIMIZER}"
    parser = flags.parser_of("memory", __doc__, quick=quick)
    flags.add_processes(parser, 2, "number of ranks (DDP, FSDP2) or devices (nn.DataParallel)")
    help = "the model to train (default: vgg11)"
    parser.add_argument("--model", choices=MODELS, default="vgg11", help=help)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help=f"default: {OPTIMIZER}")
    help = f"images per device (default: {BATCH_SIZE})"
    parser.add_argument("--batch-size", type=int, metavar="N", help=help)
    add_guess(parser, "bytes per parameter on a rank of DDP, without activations")
    options = flags.read(parser, arguments)
    options.optimizer = options.optimizer or (QUICK_OPTIMIZER if options.quick else OPTIMIZER)
    if options.batch_size is None:
        options.batch_size = QUICK_BATCH_SIZE if options.quick else BATCH_SIZE
    least = 2 if options.model.startswith("resnet") else 1  # BatchNorm on 1×1 maps needs 2 images
    if options.batch_size < least:
        raise UserError(
            f"--batch-size must be at least {least} for {options.model}, got {options.batch_size}"
        )
    return options
