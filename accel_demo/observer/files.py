"""Observe which files the script writes, and keep a copy of each file that it changes.

A shortened run must not overwrite the best checkpoint of a long one. Before a process first opens
an existing file for writing, renames or removes it, the file is copied. `restore` puts it back.
"""

import functools
import hashlib
import itertools
import os
import shutil
import sys
import threading

from .collectives import counted
from .events import FOLDER, emit, guarded, is_muted, is_own_file, line_of_script

_NO_FILES = ("/dev/", "/proc/", "/sys/")
_NOT_DATA = (".py", ".pyc", ".pyi", ".so", ".lock")
_WITHOUT_NAME = getattr(os, "O_TMPFILE", -1)
_state = {"reads": 0}
_thread = threading.local()  # `busy` is set while this thread handles an event
_seen: set[str] = set()
MOST_READS = 500
_counter = itertools.count()


def watch() -> None:
    sys.addaudithook(_hook)


def _hook(event: str, arguments: tuple) -> None:
    """Handle one audit event. https://docs.python.org/3/library/audit_events.html"""
    if event not in _HANDLERS or getattr(_thread, "busy", False):
        return
    _thread.busy = True
    try:
        _HANDLERS[event](*arguments)
    except Exception as error:
        if not _seen & {"fault"}:
            _seen.add("fault")
            emit("fault", hook="files", message=repr(error))
    finally:
        _thread.busy = False


def _opened(path, mode, flags) -> None:
    if isinstance(path, int):  # an open file
        return
    path = os.fspath(path)
    path = os.fsdecode(path)
    if flags & _WITHOUT_NAME == _WITHOUT_NAME:  # a temporary file without a name
        return
    if not flags & (os.O_WRONLY | os.O_RDWR):
        _read(path)
    elif flags & os.O_EXCL:  # a new file, such as a temporary one
        _seen.add(_absolute(path))
    else:
        _write(path, "append" if flags & os.O_APPEND else "write")


def _renamed(source, target, source_folder=-1, target_folder=-1) -> None:
    source, target = _full(source, source_folder), _full(target, target_folder)
    for path in (source, target):
        for file in _files_below(path):
            protect(file)
    _event(target, "rename")


def _removed(path, folder=-1) -> None:
    protect(_full(path, folder))


def _truncated(path, size) -> None:
    if not isinstance(path, int):
        _write(os.fsdecode(path), "write")


def _connected(database) -> None:
    path = os.fsdecode(database)
    for ending in ("", "-journal", "-wal"):
        protect(f"{path}{ending}")


def _locked(*_) -> None:
    if "torch" in sys.modules:
        _once("lock")


def _once(kind: str) -> None:
    if kind not in _seen and not is_muted():
        _seen.add(kind)
        emit(kind)


_HANDLERS = {
    "open": _opened,
    "fcntl.flock": _locked,
    "fcntl.lockf": _locked,
    "sqlite3.connect": _connected,
    "os.rename": _renamed,
    "os.remove": _removed,
    "os.truncate": _truncated,
}


def _full(path, folder: int) -> str:
    """Return the path relative to the open folder, as in `os.remove(path, dir_fd=folder)`."""
    path = os.fsdecode(path)
    if folder >= 0 and os.path.exists(f"/proc/self/fd/{folder}"):
        return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
    return path


def _files_below(path: str) -> list[str]:
    if not os.path.isdir(path) or os.path.islink(path):
        return [path]
    return [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]


def _write(path: str, how: str) -> None:
    protect(os.path.realpath(path))
    _event(os.path.realpath(path), how)


def _read(path: str) -> None:
    if _state["reads"] < MOST_READS and not path.endswith(_NOT_DATA) and is_own_file(path):
        _state["reads"] += 1
        _event(os.path.realpath(path), "read")


def _event(path: str, how: str) -> None:
    path = os.path.abspath(path)
    own = os.environ.get(FOLDER, "-")
    if path.startswith((*_NO_FILES, sys.prefix + os.sep, own)) or path.endswith(_NOT_DATA):
        return
    if "torch" in sys.modules and not is_muted():
        emit("file", path=path, how=how, line=line_of_script(4), collectives=counted())


def protect(path: str) -> None:
    """Copy a file, unless it is new or has been copied.

    Several ranks may do this at the same time. Nobody writes to the file before its copy has its
    final name, so the first copy that gets this name contains the original.
    """
    folder = os.environ.get(FOLDER)
    path = _absolute(path)
    if folder is None or path in _seen or path.startswith((*_NO_FILES, folder)):
        return
    _seen.add(path)
    name = os.path.join(folder, "files", hashlib.sha256(os.fsencode(path)).hexdigest()[:32])
    if any(os.path.lexists(f"{name}.{ending}") for ending in ("copy", "new")):
        return
    os.makedirs(os.path.dirname(name), exist_ok=True)
    _publish(f"{name}.path", lambda part: _write_bytes(part, os.fsencode(path)))
    if os.path.isdir(path):
        return
    if not os.path.lexists(path) or os.lstat(path).st_ctime > _started_at(folder):
        _publish(f"{name}.new", lambda part: _write_bytes(part, b""))
        return
    try:
        _publish(
            f"{name}.copy",
            lambda part: shutil.copy2(path, part, follow_symlinks=False),
            unless=f"{name}.new",
        )
    except OSError as error:  # no space, or no permission to read
        emit("unprotected", path=path, reason=error.strerror)


@functools.cache
def _started_at(folder: str) -> float:
    """Return the time when the audit started: files that were created later are new."""
    try:
        return os.stat(os.path.join(folder, "plan.json")).st_mtime
    except OSError:
        return float("inf")


def _absolute(path: str) -> str:
    """Return the path without links in its folders. The file itself may be a link."""
    return os.path.join(os.path.realpath(os.path.dirname(path) or "."), os.path.basename(path))


def _write_bytes(path: str, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)


def _publish(name: str, write, unless: str | None = None) -> None:
    """Create a file with its content at once. If another process was faster, keep its file."""
    # tempfile holds a lock while it opens files, so a hook cannot use it.
    part = f"{name}.{os.getpid()}-{threading.get_ident()}-{next(_counter)}"
    write(part)
    try:
        if unless is None or not os.path.lexists(unless):
            os.link(part, name, follow_symlinks=False)
    except FileExistsError:
        pass
    finally:
        os.unlink(part)


def restore(folder: str) -> tuple[list[str], list[str]]:
    """Put all copied files back. Return the paths of changed files, and of new ones."""
    changed, new = [], []
    files = os.path.join(folder, "files")
    for name in sorted(os.listdir(files)) if os.path.isdir(files) else []:
        if not name.endswith(".path"):
            continue
        base = os.path.join(files, name.removesuffix(".path"))
        with open(f"{base}.path", "rb") as file:
            path = os.fsdecode(file.read())
        if os.path.lexists(f"{base}.copy"):
            if _differs(path, f"{base}.copy"):
                os.makedirs(os.path.dirname(path), exist_ok=True)
                part = f"{path}.accel-demo-audit"
                shutil.copy2(f"{base}.copy", part, follow_symlinks=False)
                os.replace(part, path)
                changed.append(path)
        elif os.path.lexists(f"{base}.new") and os.path.lexists(path):
            new.append(path)
    return changed, new


def _differs(path: str, copy: str) -> bool:
    if not os.path.lexists(path) or os.path.islink(path) or os.path.islink(copy):
        return True
    now, then = os.stat(path), os.stat(copy)
    return (now.st_size, now.st_mtime_ns) != (then.st_size, then.st_mtime_ns)


def observe_torch(torch) -> None:
    """`torch.save` and `torch.jit.save` open the file in C++."""
    torch.save = torch.serialization.save = _observed_save(torch.save, position=1)
    torch.jit.save = _observed_save(torch.jit.save, position=1)


def observe_safetensors(module) -> None:
    """safetensors opens the file in Rust."""
    module.save_file = _observed_save(module.save_file, position=1)


def _observed_save(original, position: int):
    @functools.wraps(original)
    def save(*args, **kwargs):
        target = args[position] if len(args) > position else kwargs.get("f", kwargs.get("filename"))
        is_path = isinstance(target, (str, os.PathLike))
        if is_path:
            _saving(target)
        result = original(*args, **kwargs)
        if is_path:
            _saved(target)
        return result

    return save


@guarded
def _saving(target) -> None:
    _thread.busy = True
    try:
        path = os.path.realpath(os.fsdecode(os.fspath(target)))
        protect(path)
        _event(path, "save")
    finally:
        _thread.busy = False


@guarded
def _saved(target) -> None:
    _event(os.path.realpath(os.fsdecode(os.fspath(target))), "saved")
