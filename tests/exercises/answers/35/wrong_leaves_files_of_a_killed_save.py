# wrong: What should be deleted, and when?
import hashlib
import json
import os
import shutil
from pathlib import Path


def _sum(content):
    return hashlib.sha256(content).hexdigest()


def _read(folder):
    """The files of a complete checkpoint, or None."""
    try:
        manifest = (folder / "manifest").read_bytes()
        seal, _, text = manifest.partition(b"\n")
        if _sum(text).encode() != seal:
            return None
        sums = json.loads(text)
        files = {name: (folder / name).read_bytes() for name in sums}
    except (OSError, ValueError):
        return None
    return files if all(_sum(files[name]) == sums[name] for name in sums) else None


def _numbers(folder):
    return sorted((int(p.name[5:]) for p in folder.glob("step-*")), reverse=True)


def save(folder: Path, step: int, files: dict[str, bytes]) -> None:
    new, final = folder / ".unfinished", folder / f"step-{step}"
    for path in (final,):  # `final` can only be a damaged one
        if path.exists():
            shutil.rmtree(path)
    new.mkdir(exist_ok=True)
    for name, content in files.items():
        (new / name).write_bytes(content)
    text = json.dumps({name: _sum(content) for name, content in files.items()}).encode()
    (new / "manifest").write_bytes(_sum(text).encode() + b"\n" + text)
    os.rename(new, final)
    for old in _numbers(folder)[2:]:
        shutil.rmtree(folder / f"step-{old}")


def latest(folder: Path) -> tuple[int, dict[str, bytes]] | None:
    for step in _numbers(folder):
        files = _read(folder / f"step-{step}")
        if files is not None:
            return step, files
    return None
