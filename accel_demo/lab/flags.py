"""What the measuring verbs have in common: their options, and their results as JSON."""

import json
import math
import os
import sys
from pathlib import Path

from accel_demo.errors import Parser, UserError
from accel_demo.show import check_outputs


def parser_of(verb: str, description: str | None, quick: str, plot: bool = True) -> Parser:
    """A parser with `--quick`, which does less (`quick` says how), `--json` and `--plot`."""
    parser = Parser(description, prog=f"accel-demo {verb}")
    parser.add_argument("--quick", action="store_true", help=f"{quick}; takes about 20 s at most")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers here")
    if plot:
        help = "draw it, as .png, .svg or .pdf"
        parser.add_argument("--plot", type=Path, metavar="FILE", help=help)
    return parser


def read(parser: Parser, arguments: list[str]):
    """The options. Raises `UserError` for a mistake in them, and for a file nobody can write."""
    options = parser.parse_args(arguments)
    check_outputs(options)
    return options


def process_counts(text: str) -> list[int]:
    """ "1,2,4" as a list: numbers of processes, each at least 1. Raises `UserError` for others."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--processes takes 2, or 1,2,4; got {text}") from None
    if min(counts) < 1:
        raise UserError(f"--processes must be at least 1, got {min(counts)}")
    if max(counts) > 8 * (os.cpu_count() or 1):
        raise UserError(f"{max(counts)} processes are too many for {os.cpu_count()} cores")
    return sorted(set(counts))


def write_json(path: Path, found: dict) -> None:
    """What was found, below the command that found it and the machine it was found on.

    JSON knows neither NaN nor infinity (RFC 8259, section 6): there they are null.
    """
    from accel_demo.lab import machine

    content = {"arguments": sys.argv[1:], "environment": machine.environment(), **found}
    path.write_text(json.dumps(_finite(content), indent=2, allow_nan=False) + "\n")


def _finite(value):
    """The same lists and dictionaries, with None for each number that is not finite."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
