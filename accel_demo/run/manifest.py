"""A folder that is whole or not a checkpoint at all: how one is sealed, and how that is checked.

`manifest.json` says where the training stood and lists every other file with its size and SHA-256;
`manifest.sha256` is the sum of the manifest, and `sha256sum --check` reads it.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

from accel_demo.errors import UserError

MANIFEST, SEAL = "manifest.json", "manifest.sha256"
DISCARDED = ".discarded"
UNREADABLE = (float("inf"), 0.0)  # the position of what has no manifest that can be trusted
KEYS = {"epoch", "batches", "step", "log", "random_states", "config", "environment", "files"}


class Damaged(Exception):
    """A folder is not a whole checkpoint; the message says why."""


def seal(folder: Path, facts: dict) -> None:
    """Put every file of `folder` on the disk, and beside them a manifest of `facts` and files."""
    files = {}
    for path in sorted(folder.iterdir()):
        files[path.name] = _size_and_sum(path)
        flush(path)
    content = (json.dumps({**facts, "files": files}, indent=2) + "\n").encode()
    for name, text in ((MANIFEST, content), (SEAL, _seal_of(content))):
        (folder / name).write_bytes(text)
        flush(folder / name)
    flush(folder)


def verify(folder: Path) -> dict:
    """The manifest of a whole checkpoint. Raises `Damaged` where a byte of it is not as written.

    A file that is there but cannot be read is no damage: it raises `UserError`.
    """
    try:
        content = (folder / MANIFEST).read_bytes()
        if (folder / SEAL).read_bytes() != _seal_of(content):
            raise Damaged(f"the checksum of {MANIFEST} differs")
        manifest = json.loads(content)
        if manifest.keys() != KEYS:
            raise ValueError("other facts")
        names = {path.name for path in folder.iterdir()} - {MANIFEST, SEAL}
        for name in sorted(names ^ manifest["files"].keys()):
            raise Damaged(f"{name} is {'not part of it' if name in names else 'missing'}")
        for name, said in manifest["files"].items():
            if not (folder / name).is_file():
                raise Damaged(f"{name} is no file")
            found = _size_and_sum(folder / name)
            if found["bytes"] != said["bytes"]:
                raise Damaged(f"{name} has {found['bytes']} bytes instead of {said['bytes']}")
            if found != said:
                raise Damaged(f"the checksum of {name} differs")
    except FileNotFoundError as error:
        raise Damaged(f"{Path(error.filename).name} is missing") from None
    except OSError as error:
        raise UserError(f"{error.filename or folder} cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, KeyError, AttributeError):  # sealed, but not by `seal`
        raise Damaged(f"{MANIFEST} is of another version") from None
    return manifest


def newest_whole(run: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint of a run, and a remark on each newer one that is damaged."""
    remarks = []
    for folder in checkpoints_of(run):
        try:
            verify(folder)
        except Damaged as reason:
            remarks.append(f"{folder} is damaged ({reason}) and is not used")
        else:
            return folder, remarks
    return None, remarks


def checkpoints_of(run: Path) -> list[Path]:
    """All that call themselves checkpoints, whole or not, the newest first."""
    folder = run / "checkpoints"
    try:
        known = [
            path
            for path in folder.iterdir()
            if path.is_dir() and not path.is_symlink() and path.name[0] != "."
        ]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{folder} cannot be read ({error.strerror})") from None
    return sorted(known, key=position, reverse=True)


def position(folder: Path) -> tuple[float, float]:
    """(epochs, batches) at which a checkpoint was taken: what its manifest says, not its name.

    One whose manifest cannot be read comes after all others, so that it is noticed.
    """
    try:
        content = (folder / MANIFEST).read_bytes()
        if (folder / SEAL).read_bytes() != _seal_of(content):
            raise ValueError("not as written")
        manifest = json.loads(content)
        return float(manifest["epoch"]), float(manifest["batches"])
    except (OSError, ValueError, KeyError, TypeError):
        return UNREADABLE


def discard(folder: Path) -> None:
    """Delete a checkpoint: first its name, so that a half deleted one is never found."""
    discarded = folder.with_name(DISCARDED)
    shutil.rmtree(discarded, ignore_errors=True)
    rename(folder, discarded)
    shutil.rmtree(discarded)


def rename(folder: Path, new: Path) -> None:
    """In one step, on the disk too when this returns."""
    os.rename(folder, new)
    flush(new.parent)


def flush(path: Path) -> None:
    """Put a file, or the names in a folder, on the disk. (Only POSIX opens folders.)"""
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size_and_sum(path: Path) -> dict:
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
            size += len(piece)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _seal_of(content: bytes) -> bytes:
    return f"{hashlib.sha256(content).hexdigest()}  {MANIFEST}\n".encode()  # as sha256sum has it
