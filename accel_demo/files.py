"""Write files that are complete or absent, and flush them to disk."""

import os
import threading
from pathlib import Path


def write_whole(path: Path, content: str | bytes, is_flushed: bool = False) -> None:
    """Write a file under a temporary name and rename it, so that no incomplete file is read.

    If `is_flushed` is true, the file and its name are on disk when this returns. If `path` is a
    link, the link is replaced, and its target does not change. Text is encoded as UTF-8.
    """
    # Other processes and threads may write the same file at the same time.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        if is_flushed:
            flush(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if is_flushed:
        flush(path.parent)


def rename(folder: Path, new: Path) -> None:
    """Rename a folder, and wait until the new name is on disk."""
    os.rename(folder, new)
    flush(new.parent)


def flush(path: Path) -> None:
    """Flush a file, or a folder's list of files, to disk. Folders are flushed only on POSIX."""
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
