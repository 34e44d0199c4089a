"""Observe which files the script reads and writes, and have them copied before it changes them.

A shortened run must not overwrite the best checkpoint of a long one. Before a process opens an
existing file for writing, renames or removes it, `copies.protect` copies it.
"""

import functools
import os
import sys
import threading

from .collectives import counted
from .copies import NO_FILES, absolute, is_in_cache, protect
from .events import FOLDER, emit, is_muted, is_own_file, line_of_script

_NOT_DATA = (".py", ".pyc", ".pyi", ".so", ".lock")
_COMPILERS = tuple(
    os.path.join("", "site-packages", name, "")
    for name in ("torch/_inductor", "torch/_dynamo", "torch/_functorch", "triton")
)
_OF_PYTHON = f"{os.sep}multiprocessing{os.sep}util.py"  # creates and removes its temporary folder
_state = {"reads": 0}
_thread = threading.local()  # `busy` is set while this thread handles an event
_emitted: set[str] = set()
MOST_READS = 500


def watch() -> None:
    sys.addaudithook(_hook)


def _hook(event: str, arguments: tuple) -> None:
    """Handle one audit event. https://docs.python.org/3/library/audit_events.html"""
    if event in _HANDLERS:
        _handle(_HANDLERS[event], *arguments)


def _handle(handler, *arguments) -> None:
    """Call a handler that never raises, unless this thread is in one already.

    Files are copied even in processes whose events are not recorded, such as loader workers.
    """
    if getattr(_thread, "busy", False):
        return
    _thread.busy = True
    try:
        handler(*arguments)
    except Exception as error:
        _once("fault", hook="files", message=repr(error))
    finally:
        _thread.busy = False


def _opened(path, mode, flags) -> None:
    if isinstance(path, int):  # an open file
        return
    path = os.fsdecode(path)
    if os.path.isdir(path):  # tempfile opens a file in it that has no name, or one of its own
        return
    if not flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC):
        _read(path)
    elif flags & os.O_EXCL:  # a new file, such as a temporary one, or opening it fails
        protect(path)
    else:
        _write(path, "append" if flags & os.O_APPEND else "write")


def _renamed(source, target, source_folder=-1, target_folder=-1) -> None:
    source, target = _full(source, source_folder), _full(target, target_folder)
    for path in (source, target):
        for file in _files_below(path):
            protect(file)
    _event(target, "rename")


def _removed(path, folder=-1) -> None:
    if not _is_of_multiprocessing():
        protect(_full(path, folder))


def _truncated(path, size) -> None:
    if not isinstance(path, int):
        _write(os.fsdecode(path), "write")


def _linked(source, target, source_folder=-1, target_folder=-1) -> None:
    protect(_full(source, source_folder))  # the script may change it under its new name
    protect(_full(target, target_folder))


def _linked_by_name(source, target, folder=-1) -> None:
    protect(_full(target, folder))


def _made(path, mode, folder=-1) -> None:
    if not _is_of_multiprocessing():
        protect(_full(path, folder))


def _is_of_multiprocessing() -> bool:
    """Return True for its temporary folder, which Python does not always remove at the end."""
    return _innermost_of(lambda name: name.endswith(_OF_PYTHON)) is not None


def _connected(database) -> None:
    path = os.fsdecode(database)
    for ending in ("", "-journal", "-wal"):
        protect(f"{path}{ending}")


def _locked(*_) -> None:
    if "torch" in sys.modules:
        _once("lock")


def _ran(*_) -> None:
    if _innermost_of(lambda name: f"{os.sep}site-packages{os.sep}" in name) is None:
        _once("program")


def _once(kind: str, **fields) -> None:
    if kind not in _emitted and not is_muted():
        _emitted.add(kind)
        emit(kind, **fields)


_HANDLERS = {
    "open": _opened,
    "fcntl.flock": _locked,
    "fcntl.lockf": _locked,
    "sqlite3.connect": _connected,
    "os.rename": _renamed,
    "os.remove": _removed,
    "os.rmdir": _removed,
    "os.mkdir": _made,
    "os.link": _linked,
    "os.symlink": _linked_by_name,
    "os.system": _ran,
    "os.exec": _ran,
    "os.posix_spawn": _ran,
    "subprocess.Popen": _ran,
    "os.truncate": _truncated,
}


def _full(path, folder: int) -> str:
    """Return the path relative to the open folder, as in `os.remove(path, dir_fd=folder)`."""
    path = os.fsdecode(path)
    if folder >= 0 and os.path.exists(f"/proc/self/fd/{folder}"):
        return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
    return path


def _files_below(path: str) -> list[str]:
    """Return the path, and if it is a folder, all files, folders and links below it."""
    if not os.path.isdir(path) or os.path.islink(path):
        return [path]
    return [path] + [
        os.path.join(folder, name)
        for folder, folders, names in os.walk(path)
        for name in (*folders, *names)
    ]


def _write(path: str, how: str) -> None:
    protect(os.path.realpath(path))
    _event(os.path.realpath(path), how)


def _read(path: str) -> None:
    if _state["reads"] < MOST_READS and not path.endswith(_NOT_DATA) and is_own_file(path):
        _state["reads"] += 1
        _event(os.path.realpath(path), "read")


def _event(path: str, how: str) -> None:
    path = absolute(path)
    own = os.environ.get(FOLDER, "-")
    if path.startswith((*NO_FILES, sys.prefix + os.sep, own)) or path.endswith(_NOT_DATA):
        return
    if "torch" not in sys.modules or is_muted():
        return
    if is_in_cache(path):
        return
    if _innermost_of(lambda name: any(each in name for each in _COMPILERS)) is None:
        emit("file", path=path, how=how, line=line_of_script(), collectives=counted())


def _innermost_of(is_meant) -> str | None:
    """Return the innermost source file that `is_meant` accepts and the script has called."""
    frame = sys._getframe(1)
    while frame is not None and not is_own_file(frame.f_code.co_filename):
        if is_meant(frame.f_code.co_filename):
            return frame.f_code.co_filename
        frame = frame.f_back
    return None


def observe_torch(torch) -> None:
    """PyTorch opens the files that it saves in C++."""
    torch.save = torch.serialization.save = _observed_save(torch.save)
    jit = torch.jit
    for owner in (jit.ScriptModule, jit.RecursiveScriptModule, jit.ScriptFunction):
        owner.save = _observed_save(owner.save)
    original = torch._C.PyTorchFileWriter

    @functools.wraps(original)
    def writer(target, *args, **kwargs):  # of torch.export and torch.package
        if isinstance(target, (str, os.PathLike)):
            _handle(protect, os.path.realpath(os.fsdecode(target)))
        return original(target, *args, **kwargs)

    torch._C.PyTorchFileWriter = writer


def observe_safetensors(module) -> None:
    """safetensors opens the file in Rust."""
    module.save_file = _observed_save(module.save_file)


def _observed_save(original):
    """Return a function that saves something, the first argument, to a file, the second one."""

    @functools.wraps(original)
    def save(*args, **kwargs):
        target = args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename"))
        is_path = isinstance(target, (str, os.PathLike))
        if is_path:
            _handle(_write, os.fsdecode(target), "save")
        result = original(*args, **kwargs)
        if is_path:
            _handle(_event, os.path.realpath(os.fsdecode(target)), "saved")
        return result

    return save
