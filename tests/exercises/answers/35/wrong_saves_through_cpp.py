# wrong: save changes latest.pt without Python's built-in open(...)

import hashlib
import os

import torch


def digest(files):
    return hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()


def save(folder, step, files):
    new = folder / "latest.pt"
    if new.exists():
        os.replace(new, folder / "previous.pt")
    torch.save((step, files, digest(files)), str(new))


def latest(folder):
    for name in ("latest.pt", "previous.pt"):
        try:
            step, files, expected = torch.load(folder / name)
        except Exception:
            continue
        if expected == digest(files):
            return step, files
    return None
