"""The pitfalls and the messages that `accel-demo explain` knows."""

import re
from functools import cache
from pathlib import Path

import yaml

FOLDER = Path(__file__).parent


@cache
def pitfalls() -> list[dict]:
    """Return the entries of pitfalls.yaml, which says what their keys mean."""
    files = sorted(FOLDER.glob("pitfalls*.yaml"))
    return [entry for file in files for entry in yaml.safe_load(file.read_text())["pitfalls"]]


@cache
def pattern_of(message: str) -> re.Pattern[str]:
    """Return a pattern that finds a message, in which a number and `…` stand for any text."""
    parts = re.split(r"(…|\d+)", message)
    texts = (
        ".*?" if part == "…" else r"\d+" if part.isdigit() else re.escape(part) for part in parts
    )
    return re.compile("".join(texts))
