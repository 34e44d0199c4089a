"""The pitfalls and the messages that `accel-demo explain` looks for.

The tables of the course are made from the same two files, pitfalls.yaml and messages.yaml.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml

FOLDER = Path(__file__).parent
VARIES = re.compile(r"…|cuda(?::\d)?|\bcpu\b|\d+")


@cache
def _gallery() -> dict:
    return yaml.safe_load((FOLDER / "pitfalls.yaml").read_text())


def symptoms() -> dict[str, str]:
    """Return what the reader sees, by the key that the pitfalls use."""
    return _gallery()["symptoms"]


def pitfalls() -> list[dict]:
    """Return the entries of pitfalls.yaml, which says what their keys mean."""
    return _gallery()["pitfalls"]


@cache
def messages() -> list[dict]:
    """Return all rows of messages.yaml, which says what their keys mean."""
    content = yaml.safe_load((FOLDER / "messages.yaml").read_text())
    return content["messages"] + content["elsewhere"]


def fixed_parts(message: str) -> list[str]:
    """Return the parts of a message that are always the same."""
    return [part for part in VARIES.split(message) if part.strip()]


def pattern_of(message: str) -> re.Pattern[str]:
    """Return a pattern that finds a line with a message, whatever its numbers and devices are."""
    return line_with(fixed_parts(message))


def line_with(parts: list[str]) -> re.Pattern[str]:
    """Return a pattern that finds the beginning of a line that contains the parts in this order.

    The groups are atomic, so that even a line of a million characters is read only once.
    """
    return re.compile("^" + "".join(f"(?>.*?{re.escape(part)})" for part in parts), re.MULTILINE)


def places_of(row: dict, text: str) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each line of a text that contains the row's message."""
    parts = row["search"].split("…") if "search" in row else fixed_parts(row["message"])
    pattern, longest = line_with(parts), max(parts, key=len)
    place = text.find(longest)
    while place >= 0:
        start, end = text.rfind("\n", 0, place) + 1, text.find("\n", place)
        end = end if end >= 0 else len(text)
        if pattern.match(text, start, end):
            yield start, end
        place = text.find(longest, end)
