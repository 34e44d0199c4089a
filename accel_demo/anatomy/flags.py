"""Parse the command line of the programs in this folder."""

from pathlib import Path

from accel_demo.errors import Parser, UserError
from accel_demo.processes.environment import is_launched, number_in
from accel_demo.show import check_outputs


def command_line(description: str | None, processes: int | None = None, at_least=1) -> Parser:
    """Return a parser with the option `--plot`, and with `--processes` unless `processes` is None.

    `processes` is the default of `--processes`. `at_least` is the smallest number of processes that
    `read` accepts.
    """
    parser = Parser(description)
    if processes is not None:
        help = f"how many processes to start (default: {processes})"
        parser.add_argument("--processes", type=int, metavar="N", help=help)
        parser.set_defaults(default_processes=processes, at_least=at_least)
    help = "also draw a picture to this file (.png, .svg or .pdf)"
    parser.add_argument("--plot", metavar="FILE", type=Path, help=help)
    return parser


def read(parser: Parser, arguments: list[str] | None = None):
    """Parse the command line and return the options. Raises `UserError` if an option is invalid.

    `options.processes` is the number of processes in this launch, or the number to start if there
    is no launcher.
    """
    options = parser.parse_args(arguments)
    check_outputs(options)
    if hasattr(options, "processes"):
        if is_launched() and options.processes is not None:
            raise UserError("--processes cannot be used with a launcher. Leave it out.")
        if is_launched():
            options.processes = number_in("WORLD_SIZE", 1)
        elif options.processes is None:
            options.processes = options.default_processes
        if options.processes < options.at_least:
            least = options.at_least
            raise UserError(f"--processes must be at least {least}, got {options.processes}")
    return options
