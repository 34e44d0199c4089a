"""Exercise 35: survive a kill in the middle of a save.

Each checkpoint is one file: a line with its checksum, a line that lists names and sizes, and then
the contents. A single `os.replace` publishes it.
"""

import hashlib
import json
import os
from pathlib import Path

PARTIAL = "partial"
SUFFIX = ".checkpoint"


def save(folder: Path, step: int, files: dict[str, bytes]) -> None:
    sizes = json.dumps([step, {name: len(content) for name, content in files.items()}])
    body = b"".join([sizes.encode(), b"\n", *files.values()])
    with open(folder / PARTIAL, "wb") as partial:
        partial.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    os.replace(folder / PARTIAL, folder / f"{step:012}{SUFFIX}")
    keep = [path for path in _newest_first(folder) if _read(path) is not None][:2]
    for path in folder.iterdir():
        if path not in keep:
            path.unlink()


def latest(folder: Path) -> tuple[int, dict[str, bytes]] | None:
    contents = (_read(path) for path in _newest_first(folder))
    return next((content for content in contents if content is not None), None)


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"), reverse=True)


def _read(path: Path) -> tuple[int, dict[str, bytes]] | None:
    """Return the step and the files of a checkpoint, or None if it is damaged."""
    checksum, _, body = path.read_bytes().partition(b"\n")
    if checksum != hashlib.sha256(body).hexdigest().encode():
        return None
    sizes, _, rest = body.partition(b"\n")
    step, lengths = json.loads(sizes)
    files = {}
    for name, length in lengths.items():
        files[name], rest = rest[:length], rest[length:]
    return step, files
