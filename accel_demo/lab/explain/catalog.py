"""The pitfalls and the messages that `accel-demo explain` looks for.

The tables of the course are made from the same two files, pitfalls.yaml and messages.yaml.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml

FOLDER = Path(__file__).parent
VARIES = re.compile(r"…|\d+")
NAME_OF_ERROR = re.compile(r"^[\w. ]*(?:[Ee]rror|Warning): ")


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


def without_error(message: str) -> str:
    """Return a message without the name of the error in front of it, such as `ValueError: `."""
    return NAME_OF_ERROR.sub("", message)


def pattern_of(row: dict) -> tuple[re.Pattern[str], str]:
    """Return a pattern that finds the message of a row, and its longest part that never varies.

    The pattern matches from the beginning of a line. Its groups are atomic, so that even a line of
    a million characters is read only once.
    """
    if "search" in row:
        parts = row["search"].split("…")
    else:
        parts = [part for part in VARIES.split(row["message"]) if part.strip()]
    pattern = "".join(f"(?>.*?{re.escape(part)})" for part in parts)
    return re.compile(f"^{pattern}", re.MULTILINE), max(parts, key=len)


def places_of(row: dict, text: str) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each line of a text that contains the row's message."""
    pattern, longest = pattern_of(row)
    place = text.find(longest)
    while place >= 0:
        start, end = text.rfind("\n", 0, place) + 1, text.find("\n", place + len(longest))
        end = end if end >= 0 else len(text)
        if pattern.match(text, start, end):
            yield start, end
        place = text.find(longest, end)
