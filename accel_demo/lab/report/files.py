"""One file of a run folder, whoever has written it: read with a limit, shown without surprises."""

import json
import unicodedata
from pathlib import Path
from typing import BinaryIO

MOST_BYTES = 16 * 1024**2  # predictions.json, the largest that is read whole, has about 20 KiB
MOST_ENTRIES = 200  # of config.json and its like
LARGEST = 10**15  # numbers above it are no step, no loss and no count


class Unreadable(Exception):
    """A file, a line or a value cannot be used; the message says why, and follows its name."""


def printable(text: str, most: int = 200) -> str:
    """The text on one line of at most `most` characters.

    What would move the cursor, turn the line around, be invisible or pile up over other lines
    (control characters, marks of direction, broken Unicode, more than two accents on a letter) is
    written out, as `\\x1b` or `\\u202e`.
    """
    parts, accents = [], 0
    for c in text[: most + 1]:
        accents = accents + 1 if unicodedata.category(c) == "Mn" else 0
        parts.append(c if c.isprintable() and accents <= 2 else ascii(c)[1:-1])
    line = "".join(parts)
    return line if len(line) <= most else line[: most - 1] + "…"


def kind_of(value: object, most: int = 40) -> str:
    """A value of a JSON file as a remark names it."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return printable(json.dumps(value), most)


def is_number(value: object, least: float = 0, most: float = LARGEST) -> bool:
    """Whether it is a number in this range. NaN is in none, and true and false are no numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def is_count(value: object, most: int = LARGEST) -> bool:
    """Whether it is a whole number from 0 to `most`."""
    return isinstance(value, int) and is_number(value, 0, most)


def open_file(path: Path) -> BinaryIO:
    """The file, open for its bytes. Raises `Unreadable`: it waits for no pipe and no device."""
    try:
        if path.is_dir():
            raise Unreadable("is a folder, not a file")
        if not path.exists():
            raise Unreadable("is missing")
        if not path.is_file():
            raise Unreadable("is no ordinary file")
        return path.open("rb")
    except OSError as error:
        raise Unreadable(f"cannot be read ({error.strerror})") from None


def parse(content: bytes) -> dict:
    """What this JSON says. Raises `Unreadable` where it is none. A byte order mark may precede."""
    if b"\0" in content:
        raise Unreadable("holds NUL bytes, as files do after a crash of the machine")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise Unreadable("is not UTF-8") from None
    if not text.strip():
        raise Unreadable("is empty")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # nested a thousand times, it is none of ours either
        raise Unreadable("is not JSON") from None
    if not isinstance(value, dict):
        raise Unreadable("is JSON, but no object")
    return value


def read_object(path: Path) -> dict:
    """The object in a JSON file, as it stands there. Raises `Unreadable`."""
    with open_file(path) as file:
        try:
            content = file.read(MOST_BYTES + 1)
        except OSError as error:
            raise Unreadable(f"cannot be read ({error.strerror})") from None
    if len(content) > MOST_BYTES:
        raise Unreadable(f"is larger than {MOST_BYTES // 1024**2} MiB")
    return parse(content)


def read_entries(path: Path) -> dict[str, object]:
    """The object in a JSON file, with printable names and values: texts, numbers, true, null.

    Raises `Unreadable`.
    """
    content = read_object(path)
    if len(content) > MOST_ENTRIES:
        raise Unreadable(f"has more than {MOST_ENTRIES} entries")
    return {printable(name, 60): _entry(value) for name, value in content.items()}


def _entry(value: object) -> object:
    if isinstance(value, str):
        return printable(value)
    if value is None or isinstance(value, bool) or is_number(value, -LARGEST):
        return value
    try:
        return printable(json.dumps(value, ensure_ascii=False))  # NaN, a list, an object
    except RecursionError:
        return "(nested too deeply)"
