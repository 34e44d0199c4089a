"""Exercise 35: one file per checkpoint, which begins with the hash of everything after it."""

import hashlib
import os
import pickle
from pathlib import Path

Checkpoint = tuple[int, dict[str, bytes]]
HASH_SIZE = hashlib.sha256().digest_size


def load(path: Path) -> Checkpoint | None:
    """Return the content of a checkpoint, or None if its hash does not match."""
    with path.open("rb") as file:
        expected, payload = file.read(HASH_SIZE), file.read()
    if hashlib.sha256(payload).digest() != expected:
        return None
    return pickle.loads(payload)


def newest(folder: Path, below: float = float("inf")) -> Checkpoint | None:
    """Return the newest undamaged checkpoint with a step smaller than `below`."""
    saved = sorted(folder.glob("*.checkpoint"), key=lambda path: int(path.stem), reverse=True)
    candidates = (load(path) for path in saved if int(path.stem) < below)
    return next((checkpoint for checkpoint in candidates if checkpoint is not None), None)


def save(folder: Path, step: int, files: dict[str, bytes]) -> None:
    payload = pickle.dumps((step, files))
    draft, final = folder / "draft", folder / f"{step}.checkpoint"
    with draft.open("wb") as file:
        file.write(hashlib.sha256(payload).digest())
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(final)

    keep = {final}
    if previous := newest(folder, below=step):
        keep.add(folder / f"{previous[0]}.checkpoint")
    for path in set(folder.iterdir()) - keep:
        path.unlink()


def latest(folder: Path) -> Checkpoint | None:
    return newest(folder)
