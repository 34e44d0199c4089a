"""Test the course's claims about speed on this machine.

accel-demo bench input --quick
accel-demo bench accuracy --data-dir /usr/share/datasets/fashion-mnist --json accuracy.json
"""

import importlib

from accel_demo.errors import UserError
from accel_demo.lab.output import write_outputs
from accel_demo.options import Parser, command_parser

BENCHMARKS = {
    "input": "images per second that train.py and torchvision load",
    "overhead": "time per training step in plain PyTorch, raw DDP and Accelerate",
    "accuracy": "time to 90 % and 92 % test accuracy, compared with a conventional loop",
    "article": "images per second when our loop or an article's loop trains ResNet-101",
    "scaling": "speed of two processes, compared with one process",
    "dataparallel": "images per second of nn.DataParallel and raw DDP on the same devices",
    "optimizer": "time per AdamW step, fused and unfused",
    "limit": "FLOP/s of a training step, compared with the fastest matrix product",
    "precision": "speed, memory and loss with bf16 and torch.compile, and the compile time",
    "startup": "seconds from starting a command to its first training step",
}


def main(arguments: list[str]) -> int:
    """Run one benchmark and print its report. --json saves the report, and --plot draws it.

    Each benchmark is a module that defines `measure(options)` and REPEATS, the default for
    --repeats. A module with options of its own defines `add_options(parser)`, and can define QUICK,
    the values that --quick sets for these options.
    """
    names = "\n".join(f"  {name:13}{text}" for name, text in BENCHMARKS.items())
    parser = Parser(
        f"{(__doc__ or '').strip()}\n\nbenchmarks:\n{names}",
        prog="accel-demo bench",
        epilog="accel-demo bench NAME --help shows the options of one benchmark.",
    )
    parser.add_argument("benchmark", choices=BENCHMARKS, metavar="NAME")
    name = parser.parse_args(arguments[:1]).benchmark
    module = importlib.import_module(f"accel_demo.lab.bench.{name}")

    quick = "measure only once; slow benchmarks use fewer images, steps or models"
    parser = command_parser(f"bench {name}", module.__doc__, quick, seconds=60)
    help = f"number of times to take each measurement (default: {module.REPEATS})"
    parser.add_argument("--repeats", type=int, default=module.REPEATS, metavar="N", help=help)
    if hasattr(module, "add_options"):
        module.add_options(parser)
    if "--quick" in arguments:
        parser.set_defaults(repeats=1, **getattr(module, "QUICK", {}))
    options = parser.parse_args(arguments[1:])
    if options.repeats < 1:
        raise UserError(f"--repeats must be at least 1, got {options.repeats}")

    report = module.measure(options)
    print(report.text())
    write_outputs(options, f"bench {name}", report, type(report).draw)
    return 0
