"""Command-line flags that several commands share, and a function that writes results as JSON."""

import dataclasses
import json
import math
import os
import sys
from pathlib import Path

from accel_demo.errors import Parser, UserError
from accel_demo.show import check_outputs

SCHEMA = 1  # version of the JSON format


def parser_of(
    command: str, description: str | None, quick: str, plot: bool = True, quick_seconds: int = 20
) -> Parser:
    """Return a parser with the flags `--quick`, `--json` and `--plot`.

    `quick` is the help text for --quick. With --quick, the command takes at most about
    `quick_seconds` seconds on two idle cores.
    """
    parser = Parser(description, prog=f"accel-demo {command}")
    help = f"{quick}; takes at most about {quick_seconds} s"
    parser.add_argument("--quick", action="store_true", help=help)
    add_json(parser)
    if plot:
        help = "draw the results to FILE (.png, .svg or .pdf)"
        parser.add_argument("--plot", type=Path, metavar="FILE", help=help)
    return parser


def add_json(parser: Parser) -> None:
    """Add the flag `--json FILE`."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to FILE")


def add_processes(parser: Parser, default: int, help: str) -> None:
    """Add the flag `--processes N`, for commands that accept a single process count."""
    help = f"{help} (default: {default})"
    parser.add_argument("--processes", type=int, default=default, metavar="N", help=help)


def read(parser: Parser, arguments: list[str]):
    """Parse the arguments and return the options.

    Raises `UserError` if an argument is invalid, an output file cannot be written, or too many
    processes are requested.
    """
    options = parser.parse_args(arguments)
    check_outputs(options)
    if isinstance(getattr(options, "processes", None), int):
        _check_processes(options.processes)
    return options


def process_counts(text: str) -> list[int]:
    """Parse process counts such as "1,2,4" into a sorted list without duplicates.

    Raises `UserError` if the text is not a list of integers, or if a count is out of range.
    """
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--processes must be like 2 or 1,2,4, got {text}") from None
    for count in counts:
        _check_processes(count)
    return sorted(set(counts))


def _check_processes(count: int) -> None:
    if count < 1:
        raise UserError(f"--processes must be at least 1, got {count}")
    if count > 8 * (os.cpu_count() or 1):
        raise UserError(f"{count} processes are too many for {os.cpu_count()} cores")


def write_json(path: Path, command: str, result) -> None:
    """Write a result dataclass as JSON, with the command and a description of the machine.

    Increment `SCHEMA` whenever you rename or remove a field of any result. NaN and infinity are
    written as null, because JSON cannot represent them (RFC 8259, section 6).
    """
    from accel_demo.lab import machine

    content = {
        "schema": SCHEMA,
        "command": command,
        "arguments": sys.argv[1:],
        "environment": machine.environment(),
        **dataclasses.asdict(result),
    }
    path.write_text(json.dumps(_finite(content), indent=2, allow_nan=False) + "\n")


def _finite(value):
    """Return a copy of nested lists and dicts in which None replaces NaN and infinity."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
