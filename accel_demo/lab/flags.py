"""The flags that the commands share, and their results as JSON."""

import dataclasses
import json
import math
import os
import sys
from pathlib import Path

from accel_demo.errors import Parser, UserError
from accel_demo.show import check_outputs

SCHEMA = 1  # the version of the JSON files that the commands write


def parser_of(
    command: str, description: str | None, quick: str, plot: bool = True, quick_seconds: int = 20
) -> Parser:
    """Return a parser with `--quick`, `--json` and `--plot`.

    `quick` says what --quick does, and `quick_seconds` how long it takes on two idle cores.
    """
    parser = Parser(description, prog=f"accel-demo {command}")
    help = f"{quick}; takes about {quick_seconds} s at most"
    parser.add_argument("--quick", action="store_true", help=help)
    add_json(parser)
    if plot:
        help = "draw it, as .png, .svg or .pdf"
        parser.add_argument("--plot", type=Path, metavar="FILE", help=help)
    return parser


def add_json(parser: Parser) -> None:
    """Add `--json`, which every command has that prints numbers."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers here")


def add_processes(parser: Parser, default: int, help: str) -> None:
    """Add `--processes N`, for a command that starts one number of processes."""
    help = f"{help} (default: {default})"
    parser.add_argument("--processes", type=int, default=default, metavar="N", help=help)


def read(parser: Parser, arguments: list[str]):
    """Return the options.

    Raises `UserError` for a mistake in them, a file that cannot be written, or too many processes.
    """
    options = parser.parse_args(arguments)
    check_outputs(options)
    if isinstance(getattr(options, "processes", None), int):
        _check_processes(options.processes)
    return options


def process_counts(text: str) -> list[int]:
    """Return "1,2,4" as a list of numbers of processes. Raises `UserError` for anything else."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--processes takes 2, or 1,2,4; got {text}") from None
    for count in counts:
        _check_processes(count)
    return sorted(set(counts))


def _check_processes(count: int) -> None:
    if count < 1:
        raise UserError(f"--processes must be at least 1, got {count}")
    if count > 8 * (os.cpu_count() or 1):
        raise UserError(f"{count} processes are too many for {os.cpu_count()} cores")


def write_json(path: Path, command: str, result) -> None:
    """Write the fields of a dataclass, with the command and the machine.

    `schema` rises by one whenever a field of any result is renamed or removed. NaN and infinity
    become null: JSON does not have them (RFC 8259, section 6).
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
    """Return the same lists and dictionaries, with None for each number that is not finite."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
