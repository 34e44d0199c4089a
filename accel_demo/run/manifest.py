"""The manifest of a checkpoint, used to check that the checkpoint is complete and unchanged.

`manifest.json` contains the position in the run, and the size and SHA-256 of every file in the
checkpoint. `sha256sum --check manifest.sha256` checks the manifest itself.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

from accel_demo.errors import UserError
from accel_demo.files import flush, rename

MANIFEST, SEAL = "manifest.json", "manifest.sha256"
DISCARDED = ".discarded"
UNREADABLE = (float("inf"), 0.0)  # position of a folder whose manifest is missing or damaged
KEYS = {"epoch", "batches", "step", "log", "random_states", "config", "environment", "files"}
# Keys of `environment` that a resumed run compares with its own
COMPARED = {"script", "processes", "device", "mixed_precision", "threads_per_process"}
COMPARED |= {"torch", "accelerate"}
# First letters of all names that `accelerator.load_state` and `TrainingState.load` open. FSDP saves
# folders of shards, whose names start with "pytorch_model" and "optimizer".
# Source: accelerate/checkpointing.py, accelerate/utils/fsdp_utils.py
LOADED = ("model", "pytorch_model", "optimizer", "scheduler", "sampler", "scaler", "random_states")
LOADED += ("custom_checkpoint", "dl_state_dict")


class Damaged(Exception):
    """A checkpoint is incomplete or has been changed. The message describes the damage."""


def seal(folder: Path, facts: dict) -> None:
    """Flush all files in `folder` to disk, then write the manifest: `facts` and the checksums.

    Hidden files, such as .DS_Store, are not listed: the system creates and deletes them.
    """
    files = {}
    for name in sorted(name for name in _files_in(folder) if name[0] != "."):
        files[name] = _size_and_sum(folder / name)
        flush(folder / name)
    for inner in sorted({(folder / name).parent for name in files} - {folder}):
        flush(inner)
    content = (json.dumps({**facts, "files": files}, indent=2) + "\n").encode()
    for name, text in ((MANIFEST, content), (SEAL, _seal_of(content))):
        (folder / name).write_bytes(text)
        flush(folder / name)
    flush(folder)


def verify(folder: Path) -> dict:
    """Return the manifest of a checkpoint.

    Raises `Damaged` if a listed file was changed or removed, or if a file was added that loading
    the checkpoint might read. Other added files are ignored: see `ignored_files`. Raises
    `UserError` if the operating system cannot read a file.
    """
    try:
        manifest = _sealed_manifest(folder)
        if manifest.keys() != KEYS or not manifest["environment"].keys() >= COMPARED:
            raise ValueError("different keys")
        for name in sorted(_files_in(folder, LOADED) - manifest["files"].keys()):
            raise Damaged(f"{name} is not in the manifest: move it to a different folder")
        for name, expected in manifest["files"].items():
            if not (folder / name).is_file():
                is_there = os.path.lexists(folder / name)
                raise Damaged(f"{name} is {'not a file' if is_there else 'missing'}")
            actual = _size_and_sum(folder / name)
            if actual["bytes"] != expected["bytes"]:
                raise Damaged(f"{name} has {actual['bytes']} bytes instead of {expected['bytes']}")
            if actual != expected:
                raise Damaged(f"the checksum of {name} differs")
    except FileNotFoundError as error:
        raise Damaged(f"{Path(error.filename).name} is missing") from None
    except OSError as error:
        raise UserError(f"{error.filename or folder} cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, KeyError, AttributeError):  # another version of `seal` wrote it
        raise Damaged(f"{MANIFEST} is from a different version") from None
    return manifest


def ignored_files(folder: Path, manifest: dict) -> list[str]:
    """Return the names in a verified checkpoint that its manifest does not list."""
    listed = {name.split("/")[0] for name in manifest["files"]} | {MANIFEST, SEAL}
    return sorted({path.name for path in folder.iterdir()} - listed)


def newest_complete(run: Path) -> tuple[Path | None, list[str]]:
    """Return the newest complete checkpoint, and a remark about each damaged one that is newer.

    A checkpoint with an unreadable manifest may be newer, so there is a remark about it, too.
    """
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
    """Return all published checkpoints of a run, damaged or not. Newest, or unreadable, first.

    Any folder with a manifest is a checkpoint, and so is a folder with the name of a checkpoint.
    """
    folder = run / "checkpoints"
    try:
        named = [path for path in folder.iterdir() if path.name[0] != "." and not path.is_symlink()]
        known = [
            path
            for path in named
            if os.path.exists(path / MANIFEST) or (path.name.startswith("epoch-") and path.is_dir())
        ]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{folder} cannot be read ({error.strerror})") from None
    return sorted(known, key=position, reverse=True)


def position(folder: Path) -> tuple[float, float]:
    """Return (epoch, batches on all processes together) from the manifest of a checkpoint.

    If the manifest cannot be read, return `UNREADABLE`, which sorts as the newest position, so that
    `newest_complete` reports the checkpoint.
    """
    try:
        manifest = _sealed_manifest(folder)
        batches = manifest["batches"] * manifest["environment"]["processes"]
        return float(manifest["epoch"]), float(batches)
    except (Damaged, OSError, ValueError, KeyError, TypeError):
        return UNREADABLE


def discard(folder: Path) -> None:
    """Delete a checkpoint. Rename it first, so that no run finds a half-deleted checkpoint."""
    discarded = folder.with_name(DISCARDED)
    shutil.rmtree(discarded, ignore_errors=True)
    rename(folder, discarded)
    shutil.rmtree(discarded)


def _files_in(folder: Path, beginnings: tuple[str, ...] = ("",)) -> set[str]:
    """Return the paths of all files below `folder`, relative to it: FSDP saves folders of files.

    Only return paths that start with one of `beginnings`. An empty folder and a link to a folder
    count as files, so that they are noticed.
    """
    names: set[str] = set()
    for path in folder.iterdir():
        if not path.name.startswith(beginnings):
            continue
        if path.is_dir() and not path.is_symlink() and (inner := _files_in(path)):
            names |= {f"{path.name}/{name}" for name in inner}
        else:
            names.add(path.name)
    return names


def _size_and_sum(path: Path) -> dict:
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
            size += len(piece)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _sealed_manifest(folder: Path) -> dict:
    content = (folder / MANIFEST).read_bytes()
    if (folder / SEAL).read_bytes() != _seal_of(content):
        raise Damaged(f"the checksum of {MANIFEST} differs")
    return json.loads(content)


def _seal_of(content: bytes) -> bytes:
    """Return the line that `sha256sum manifest.json` prints."""
    return f"{hashlib.sha256(content).hexdigest()}  {MANIFEST}\n".encode()
