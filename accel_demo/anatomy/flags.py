"""The command line that the programs of this folder have in common."""

from pathlib import Path

from accel_demo.errors import Parser, UserError
from accel_demo.processes.environment import is_launched, number_in
from accel_demo.show import check_outputs


def command_line(description: str | None, processes: int | None = None) -> Parser:
    """Return a parser with `--plot`, and with `--processes` if it is given a default."""
    parser = Parser(description)
    if processes is not None:
        help = f"how many processes to start (default: {processes})"
        parser.add_argument("--processes", type=int, metavar="N", help=help)
        parser.set_defaults(default_processes=processes)
    help = "also draw it, as .png, .svg or .pdf"
    parser.add_argument("--plot", metavar="FILE", type=Path, help=help)
    return parser


def read(parser: Parser, arguments: list[str] | None = None):
    """Return the options. `processes` is their number in this launch, or the number to start.

    Raises `UserError` if there is a mistake in them.
    """
    options = parser.parse_args(arguments)
    check_outputs(options)
    if hasattr(options, "processes"):
        if is_launched() and options.processes is not None:
            raise UserError("--processes is for starting without a launcher: leave it out")
        if is_launched():
            options.processes = number_in("WORLD_SIZE", 1)
        elif options.processes is None:
            options.processes = options.default_processes
        if options.processes < 1:
            raise UserError(f"--processes must be at least 1, got {options.processes}")
    return options
