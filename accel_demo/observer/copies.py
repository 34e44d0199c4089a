"""Copy each file before the script changes it, and put it back at the end.

Every process of the script calls `protect` before it changes a file, and the keeper of the audit
calls `restore`. What is known about a file is in `files/HASH.ENDING` in the folder of the audit.
HASH is that of its path, and ENDING is one of

- path: its path,
- copy: its content before the script changed it,
- new: it did not exist,
- folder: it was a folder,
- inode: its device and inode,
- lost: the reason why it could not be copied.

All but the copies are links that point to the information, because a link is created at once, and
even if the disk is full.
"""

import errno
import filecmp
import functools
import hashlib
import itertools
import os
import shutil
import stat
import threading
from contextlib import suppress
from dataclasses import dataclass, field

from .events import FOLDER

NO_FILES = ("/dev/", "/proc/", "/sys/")
_BYTECODE = f"{os.sep}__pycache__{os.sep}"
_seen: set[str] = set()
_counter = itertools.count()


def protect(path: str) -> None:
    """Copy a file, unless it is new or has been copied.

    Several ranks and threads may do this at the same time. None of them returns, and changes the
    file, before a copy has its final name. So the first copy that gets this name is the original.
    """
    folder = os.environ.get(FOLDER)
    path = absolute(path)
    if folder is None or path in _seen or _BYTECODE in path:
        return
    if path.startswith((*NO_FILES, folder)):
        return
    try:
        _record(path, folder)
    finally:
        _seen.add(path)  # not earlier: another thread would not wait for the copy


def _record(path: str, folder: str) -> None:
    base = _base(path, folder)
    if any(os.path.lexists(f"{base}.{ending}") for ending in ("copy", "new", "folder", "lost")):
        return
    os.makedirs(os.path.dirname(base), exist_ok=True)
    _note(path, f"{base}.path")
    try:
        if not os.path.lexists(path) or _is_in_new_folder(path, folder):
            _note("new", f"{base}.new")
        elif stat.S_ISDIR(os.lstat(path).st_mode):
            _note("folder", f"{base}.folder")
        elif os.path.islink(path) or os.path.isfile(path):  # not a socket or a pipe
            _copy(path, base)
    except OSError as error:  # no space, or no permission to read
        _note(_reason(error), f"{base}.lost")


def _base(path: str, folder: str) -> str:
    return os.path.join(folder, "files", hashlib.sha256(os.fsencode(path)).hexdigest()[:32])


def _note(information: str, name: str) -> None:
    with suppress(FileExistsError):
        os.symlink(information, name)


def _is_in_new_folder(path: str, folder: str) -> bool:
    """Return True if the script has created a folder of the path. Other programs may write there.

    Not even the time when a file was changed would show that it is new: `chmod` sets it, too.
    """
    while (parent := os.path.dirname(path)) != path:
        if os.path.lexists(f"{_base(parent, folder)}.new"):
            return True
        path = parent
    return False


def _copy(path: str, base: str) -> None:
    # tempfile holds a lock while it opens files, so a hook cannot use it.
    part = f"{base}.{os.getpid()}-{threading.get_ident()}-{next(_counter)}"
    try:
        shutil.copy2(path, part, follow_symlinks=False)
        status = os.lstat(path)
        _note(_inode(status), f"{base}.inode")
        if status.st_nlink > 1:  # the script may have changed it under its other name
            shared = os.path.join(os.path.dirname(base), _inode(status))
            with suppress(FileExistsError):
                os.link(part, shared, follow_symlinks=False)
            os.unlink(part)
            os.link(shared, part, follow_symlinks=False)
        if not any(os.path.lexists(f"{base}.{ending}") for ending in ("new", "lost")):
            with suppress(FileExistsError):
                os.link(part, f"{base}.copy", follow_symlinks=False)
    finally:
        _remove(part)


def _inode(status: os.stat_result) -> str:
    return f"{status.st_dev}-{status.st_ino}"


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error) or repr(error)


def absolute(path: str) -> str:
    """Return the path without links in its folders. The file itself may be a link."""
    path = path.rstrip(os.sep) or os.sep
    if os.path.basename(path) in (os.curdir, os.pardir):
        return os.path.realpath(path)
    return os.path.join(os.path.realpath(os.path.dirname(path) or "."), os.path.basename(path))


@dataclass
class Restored:
    """What `restore` has done, by absolute paths.

    `failed` maps the files that could not be put back to the reasons, and `kept` are their copies.
    """

    changed: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)


def restore(folder: str) -> Restored:
    """Put all copied files back. A file that cannot be put back does not stop the others."""
    result = Restored()
    for path in _recorded(folder):
        base = _base(path, folder)
        try:
            if os.path.lexists(f"{base}.copy"):
                if _put_back(path, base):
                    result.changed.append(path)
            elif os.path.lexists(f"{base}.folder"):
                if os.path.islink(path):
                    os.unlink(path)
                _make_folder(path)
            elif os.path.lexists(f"{base}.new"):
                if _has_files(path) and not _is_in_new_folder(path, folder):
                    result.new += [] if is_in_cache(path) else [path]
            elif os.path.lexists(f"{base}.lost"):
                result.failed[path] = f"it could not be copied: {os.readlink(f'{base}.lost')}"
        except Exception as error:
            result.failed[path] = _reason(error)
            if os.path.lexists(f"{base}.copy"):
                result.failed[path] += f"; its copy: {base}.copy"
                result.kept.append(f"{base}.copy")
    return result


def unwritten(folder: str) -> list[str]:
    """Return the files that the script has opened for writing, but has written nothing to.

    They are as they were, or new and empty. Call this before `restore`.
    """
    found = []
    for path in _recorded(folder):
        copy = f"{_base(path, folder)}.copy"
        with suppress(OSError):
            if os.path.lexists(copy):
                found += [] if _differs(path, copy) else [path]
            elif os.path.isfile(path) and os.path.getsize(path) == 0:
                found.append(path)
    return found


def _recorded(folder: str) -> list[str]:
    """Return the paths that were given to `protect`, each folder before the files in it."""
    files = os.path.join(folder, "files")
    names = os.listdir(files) if os.path.isdir(files) else []
    links = [os.path.join(files, name) for name in names if name.endswith(".path")]
    return sorted(map(os.readlink, links))


def _has_files(path: str) -> bool:
    """Return True if the path is that of a file or of a folder with files below it."""
    if not os.path.isdir(path) or os.path.islink(path):
        return os.path.lexists(path)
    return any(
        names or any(os.path.islink(os.path.join(folder, name)) for name in folders)
        for folder, folders, names in os.walk(path)
    )


def remove_copies(folder: str, kept: list[str]) -> None:
    """Delete all copies but those in `kept`."""
    files = os.path.join(folder, "files")
    for name in os.listdir(files) if os.path.isdir(files) else []:
        if os.path.join(files, name) not in kept:
            os.unlink(os.path.join(files, name))
    if os.path.isdir(files) and not kept:
        os.rmdir(files)


def is_in_cache(path: str) -> bool:
    return path.startswith(_caches()) or f"{os.sep}torchinductor_" in path


@functools.cache
def _caches() -> tuple[str, ...]:
    """Return the folders of caches, which libraries share safely between processes."""
    variables = ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "TRITON_CACHE_DIR")
    folders = [os.environ.get(name) or "~/.cache" for name in variables] + ["~/.triton"]
    return tuple(os.path.join(os.path.realpath(os.path.expanduser(each)), "") for each in folders)


def _put_back(path: str, base: str) -> bool:
    """Put one file back. Return False if it has not changed."""
    copy = f"{base}.copy"
    if not _differs(path, copy):
        return False
    if os.path.isdir(path) and not os.path.islink(path):
        raise IsADirectoryError(errno.EISDIR, "it is a folder now")
    _make_folder(os.path.dirname(path))
    if _is_the_same_file(path, base):  # in place: it keeps its owner and its other hard links
        shutil.copyfile(copy, path)
        shutil.copystat(copy, path)
        return True
    part = os.path.join(os.path.dirname(path), f".accel-demo-audit-{os.path.basename(base)}")
    _remove(part)  # of a keeper that was killed
    try:
        shutil.copy2(copy, part, follow_symlinks=False)
        os.replace(part, path)
    finally:
        _remove(part)
    return True


def _make_folder(path: str) -> None:
    """Create a folder that existed, if the script has removed it."""
    try:
        os.makedirs(path, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise OSError(f"{path} is not a folder now") from None
    if os.path.realpath(path) != path:
        raise OSError(f"{path} is in a folder that is a link now")


def _is_the_same_file(path: str, base: str) -> bool:
    """Return True if the script has not replaced the file by another one."""
    if not os.path.lexists(path) or os.path.islink(path) or not os.path.lexists(f"{base}.inode"):
        return False
    return _inode(os.lstat(path)) == os.readlink(f"{base}.inode")


def _differs(path: str, copy: str) -> bool:
    if not os.path.lexists(path) or os.path.islink(path) != os.path.islink(copy):
        return True
    if os.path.islink(path):
        return os.readlink(path) != os.readlink(copy)
    now, then = os.lstat(path), os.lstat(copy)
    if (now.st_size, now.st_mtime_ns) != (then.st_size, then.st_mtime_ns):
        return True
    return not os.path.isfile(path) or not filecmp.cmp(path, copy, shallow=False)
