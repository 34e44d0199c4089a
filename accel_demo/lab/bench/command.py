"""Measure on this machine what the course says about speed.

accel-demo bench input
accel-demo bench accuracy --data-dir /usr/share/datasets/fashion-mnist --json accuracy.json
"""

import importlib
from pathlib import Path

from accel_demo.errors import Parser, UserError
from accel_demo.show import check_outputs

BENCHMARKS = {
    "input": "images per second of our data path against torchvision's",
    "overhead": "what a step costs in plain PyTorch, in raw DDP and with Accelerate",
    "accuracy": "seconds to 90 % and 92 % test accuracy against a conventional training",
    "article": "ResNet-101 as an article trains it against the same model in our loop",
    "scaling": "what two processes gain over one",
    "dataparallel": "nn.DataParallel against raw DDP on the same devices",
    "optimizer": "the optimizer's step, fused and not",
    "limit": "the share of the machine's matrix-multiply rate that a training step reaches",
    "precision": "fp32, bf16 and torch.compile: speed, memory, loss, and what compiling costs",
    "startup": "seconds from a command to the first step of training",
}


def main(arguments: list[str]) -> int:
    """Each module beside this one has REPEATS, `add_options(parser)` and `measure(options)`."""
    names = "\n".join(f"  {name:13}{text}" for name, text in BENCHMARKS.items())
    parser = Parser(
        f"{(__doc__ or '').strip()}\n\nbenchmarks:\n{names}",
        prog="accel-demo bench",
        epilog="accel-demo bench NAME --help tells more of one.",
    )
    parser.add_argument("benchmark", choices=BENCHMARKS, metavar="NAME")
    name = parser.parse_args(arguments[:1]).benchmark
    module = importlib.import_module(f"accel_demo.lab.bench.{name}")

    parser = Parser(module.__doc__, prog=f"accel-demo bench {name}")
    help = f"how often everything is measured, in turns (default: {module.REPEATS})"
    parser.add_argument("--repeats", type=int, default=module.REPEATS, metavar="N", help=help)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the tables (.png, .svg)")
    module.add_options(parser)
    options = parser.parse_args(arguments[1:])
    check(options)

    report = module.measure(options)
    print(report.text())
    if options.json:
        report.write_json(options.json)
    if options.plot:
        report.draw(options.plot)
    return 0


def check(options) -> None:
    """Raise `UserError` for what would only be found out after the measurements."""
    if options.repeats < 1:
        raise UserError(f"--repeats must be at least 1, got {options.repeats}")
    check_outputs(options)
