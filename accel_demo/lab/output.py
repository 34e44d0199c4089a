"""Print the result of a command, and write it to the files that its options name."""

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from accel_demo.errors import say
from accel_demo.lab import load
from accel_demo.terminal import display

SCHEMA = 3  # version of the JSON format


# Commands whose results depend on the speed of the machine, or on its memory
MEASURE_TIME = {"timeline", "scaling", "memory", "bench", "slower"}


@dataclass(frozen=True)
class MeasuredFinding:
    """What is wrong, or what makes the steps slow. `kind` is for example "waits for data"."""

    kind: str
    rank: int | None  # None if it is not one rank alone
    text: str


def write_outputs(options, command: str, result, draw: Callable, of_script: bool = False) -> None:
    """Write the JSON file for `--json`, and call `draw(result, path)` for `--plot`.

    `of_script` is True if the result is about the reader's script.
    """
    warn(command, of_script)
    if options.json:
        write_json(options.json, command, result, of_script)
    if options.plot:
        draw(result, options.plot)


def warn(command: str, of_script: bool = False) -> None:
    """Print a warning if the machine was busy.

    What our own code does is the same on a busy machine, unless it is measured in seconds or bytes.
    Then the warning goes to stderr, so that equal results are printed alike.
    """
    if text := load.warning():
        if command.split()[0] in MEASURE_TIME:
            display(f"\n**{text}: measure again when it is idle**")
        elif of_script:
            display(f"\n**{text}; only the time depends on that**")
        else:
            say(f"{text}; only the time depends on that")


def print_text(text: str) -> None:
    """Print text that may come from the files of a run, which cannot control the terminal.

    Nonprintable characters are escaped.
    """
    display("".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text))


def write_json(path: Path, command: str, result, of_script: bool = False) -> None:
    """Write a result dataclass as JSON, with the command and a description of the machine.

    "subject" is "script" if the result is about the reader's script, otherwise "accel-demo". Each
    file has "findings", a list of `MeasuredFinding`: what is wrong, or empty.

    Increment `SCHEMA` whenever you rename or remove a field of any result. NaN and infinity are
    written as null, because JSON cannot represent them (RFC 8259, section 6).
    """
    from accel_demo.lab import machine

    content = {
        "schema": SCHEMA,
        "command": command,
        "subject": "script" if of_script else "accel-demo",
        "arguments": sys.argv[1:],
        "environment": machine.environment(),
        "load": load.now(),
        "findings": [],
        **dataclasses.asdict(result),
    }
    text = json.dumps(_finite(content), indent=2, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def _finite(value):
    """Return a copy of nested lists and dicts in which None replaces NaN and infinity."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
