"""Test the course's claims about speed on this machine.

accel-demo bench dataparallel --quick
accel-demo bench precision --quick --json precision.json
"""

import importlib
from types import ModuleType

from accel_demo.errors import UserError
from accel_demo.lab.output import write_outputs
from accel_demo.options import Parser, command_parser
from accel_demo.terminal import display

BENCHMARKS = {
    "dataparallel": "images per second of nn.DataParallel and raw DDP on the same devices",
    "precision": "speed and memory of a training step in bf16 and in fp32",
}


def main(arguments: list[str]) -> int:
    """Run one benchmark, and return 0."""
    name = make_parser().parse_args(arguments[:1]).benchmark
    run_benchmark(module_of(name), f"accel-demo bench {name}", arguments[1:])
    return 0


def make_parser() -> Parser:
    names = "\n".join(f"  {name:14}{text}" for name, text in BENCHMARKS.items())
    parser = Parser(
        f"{(__doc__ or '').strip()}\n\nbenchmarks:\n{names}",
        prog="accel-demo bench",
        epilog="accel-demo bench NAME --help shows the options of one benchmark.",
    )
    parser.add_argument("benchmark", choices=BENCHMARKS, metavar="NAME")
    return parser


def parsers() -> dict[str, Parser]:
    """Return the parser of each benchmark."""
    return {name: parser_of(module_of(name), f"accel-demo bench {name}") for name in BENCHMARKS}


def module_of(name: str) -> ModuleType:
    return importlib.import_module(f"accel_demo.lab.bench.{name}")


def run_benchmark(module: ModuleType, program: str, arguments: list[str]) -> None:
    """Run one benchmark and print its report. --json saves the report, and --plot draws it.

    The module defines `measure(options)` and REPEATS, the default for --repeats. A module with
    options of its own defines `add_options(parser)`, and can define QUICK, the values that --quick
    sets for these options. `program` is the command line without its arguments.
    """
    parser = parser_of(module, program)
    if "--quick" in arguments:
        parser.set_defaults(repeats=1, **getattr(module, "QUICK", {}))
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        raise UserError(f"--repeats must be at least 1, got {options.repeats}")

    report = module.measure(options)
    display(report.text())
    write_outputs(options, program.removeprefix("accel-demo "), report, type(report).draw)


def parser_of(module: ModuleType, program: str) -> Parser:
    """Return the parser of one benchmark. The arguments are those of `run_benchmark`."""
    quick = "measure only once; slow benchmarks use fewer images, steps or models"
    parser = command_parser(program.removeprefix("accel-demo "), module.__doc__, quick, seconds=60)
    parser.prog = program
    help = f"number of times to take each measurement (default: {module.REPEATS})"
    parser.add_argument("--repeats", type=int, default=module.REPEATS, metavar="N", help=help)
    if hasattr(module, "add_options"):
        module.add_options(parser)
    return parser
