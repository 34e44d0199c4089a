"""The pitfalls and the messages that `accel-demo explain` looks for.

The tables of the course are made from the same two files, pitfalls.yaml and messages.yaml.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml

FOLDER = Path(__file__).parent


@cache
def _gallery() -> dict:
    return yaml.safe_load((FOLDER / "pitfalls.yaml").read_text(encoding="utf-8"))


def symptoms() -> dict[str, str]:
    """Return what the reader sees, by the key that the pitfalls use."""
    return _gallery()["symptoms"]


def pitfalls() -> list[dict]:
    """Return the entries of pitfalls.yaml, which says what their keys mean."""
    return _gallery()["pitfalls"]


@cache
def messages() -> list[dict]:
    """Return all rows of messages.yaml, which says what their keys mean."""
    content = yaml.safe_load((FOLDER / "messages.yaml").read_text(encoding="utf-8"))
    return content["messages"] + content["elsewhere"]


def places_of(message: str, text: str) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each line of a text that contains a message.

    `…` in the message stands for any text. The groups of the pattern are atomic, so that even a
    line of a million characters is read only once.
    """
    parts = message.split("…")
    pattern = re.compile("".join(f"(?>.*?{re.escape(part)})" for part in parts))
    longest = max(parts, key=len)
    place = text.find(longest)
    while place >= 0:
        start, end = text.rfind("\n", 0, place) + 1, text.find("\n", place)
        end = end if end >= 0 else len(text)
        if pattern.match(text, start, end):
            yield start, end
        place = text.find(longest, end)
