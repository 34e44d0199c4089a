"""The pitfalls and the messages that `accel-demo explain` knows.

The tables of the course are made from the same two files, pitfalls.yaml and messages.yaml.
"""

import re
from functools import cache
from pathlib import Path

import yaml

FOLDER = Path(__file__).parent
VARIES = re.compile(r"…|cuda(?::\d)?|\bcpu\b|\d+")


@cache
def symptoms() -> dict[str, str]:
    """Return what the reader sees, by the key that the pitfalls use."""
    return yaml.safe_load((FOLDER / "pitfalls.yaml").read_text())["symptoms"]


@cache
def pitfalls() -> list[dict]:
    """Return the entries of pitfalls.yaml, which says what their keys mean."""
    files = sorted(FOLDER.glob("pitfalls*.yaml"))
    return [entry for file in files for entry in yaml.safe_load(file.read_text())["pitfalls"]]


@cache
def messages() -> list[dict]:
    """Return the rows of messages.yaml, which says what their keys mean."""
    return yaml.safe_load((FOLDER / "messages.yaml").read_text())["messages"]


def fixed_parts(message: str) -> list[str]:
    """Return the parts of a message that are always the same."""
    return [part for part in VARIES.split(message) if part.strip()]


@cache
def pattern_of(message: str) -> re.Pattern[str]:
    """Return a pattern that finds a message, whatever its numbers and devices are."""
    return re.compile(".*".join(map(re.escape, fixed_parts(message))))
