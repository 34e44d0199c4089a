"""Write what happens in this process to a file of its own, one JSON object per line.

Every event has `kind`, `time` (seconds, equal clocks on one machine) and `line`: the place in the
script that caused it, as [file, line number, function].
"""

import errno
import functools
import json
import os
import sys
import sysconfig
import time
from collections.abc import Sequence
from contextlib import suppress

# Environment variables: the folder that receives the files
FOLDER = "ACCEL_DEMO_AUDIT"
NODE_FOLDER = "ACCEL_DEMO_NODE"  # and only the events of processes.py
PARENT = "ACCEL_DEMO_AUDIT_PARENT"  # set by each observed process to its own ID
LOST = {"kind": "lost"}
_OBSERVER = os.path.dirname(os.path.abspath(__file__)) + os.sep
LIBRARIES = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
) + (os.path.join(sys.base_prefix, "lib") + os.sep,)
_CO_GENERATOR = 0x20  # inspect.CO_GENERATOR; importing inspect takes time


class _Log:
    """The file of this process. A forked process opens its own."""

    folder: str = ""
    begun_in = 0  # ID of the process that `parent` belongs to
    parent = 0
    process = 0  # ID of the process that opened the file
    file = -1
    muted = False
    faults: set[str] = set()


def begin(folder: str) -> None:
    """Write all further events to files in `folder`."""
    _Log.folder = folder
    _Log.parent, _Log.begun_in = int(os.environ.get(PARENT) or 0), os.getpid()
    os.environ[PARENT] = str(os.getpid())


def mute() -> None:
    """Write no more events in this process, because it is not a training process."""
    _Log.process, _Log.muted = os.getpid(), True


def is_muted() -> bool:
    return not _Log.folder or (_Log.muted and _Log.process == os.getpid())


def path_of(name: str, pid: int | None = None) -> str:
    """Return the path of a file of this process, or of another one. `name` is its ending."""
    return os.path.join(_Log.folder, f"{pid or os.getpid()}.{name}")


def emit(kind: str, /, **fields) -> None:
    """Write one event. If that fails, for example on a full disk, write no more of them."""
    if is_muted():
        return
    try:
        if _Log.process != os.getpid():  # the first event, or the first one after a fork
            _begin_process()
        _write(kind, **fields)
    except OSError:
        mute()
        with suppress(OSError):  # needs no space on the disk
            os.close(os.open(path_of("lost"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


def _begin_process() -> None:
    _Log.process, _Log.muted = os.getpid(), False
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    _Log.file = os.open(path_of("jsonl"), flags, 0o600)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    variables = {name: os.environ[name] for name in names if name in os.environ}
    _write("process", pid=os.getpid(), parent=_parent(), variables=variables)


def _parent() -> int:
    """Return the ID of the closest observed process above this one, or 0."""
    if _Log.begun_in != os.getpid():  # this process was forked
        _Log.parent, _Log.begun_in = _Log.begun_in, os.getpid()
        os.environ[PARENT] = str(os.getpid())
    return _Log.parent


def _write(kind: str, /, **fields) -> None:
    line = json.dumps({"kind": kind, "time": time.time(), **fields}, default=str)
    content = line.encode() + b"\n"
    if os.write(_Log.file, content) < len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_events(folder: str) -> list[list[dict]]:
    """Return the events of each process, the first one is "process".

    A line that is not complete yet is left out. The event "lost" replaces one that is damaged. It
    is also the last one of a process that could not write all its events (see `emit`).
    """
    names = os.listdir(folder)
    processes = {}
    for name in names:
        if name.endswith(".jsonl"):
            processes[name.removesuffix(".jsonl")] = read_file(os.path.join(folder, name))
    for name in names:
        if name.endswith(".lost"):
            processes.setdefault(name.removesuffix(".lost"), []).append(dict(LOST))
    return [_ordered(int(pid), events) for pid, events in processes.items() if events]


def read_file(path: str) -> list[dict]:
    with open(path, encoding="utf-8", errors="replace") as file:
        return [_event_of(line) for line in file.read().split("\n")[:-1]]


def _event_of(line: str) -> dict:
    try:
        event = json.loads(line)
        return event if event.keys() >= {"kind", "time"} else dict(LOST)
    except (ValueError, AttributeError):
        return dict(LOST)


def _ordered(pid: int, events: list[dict]) -> list[dict]:
    """Let the events begin with "process", and give lost events the time of the event before."""
    time_before = next((event["time"] for event in events if "time" in event), 0.0)
    if events[0]["kind"] != "process":
        events.insert(0, {"kind": "process", "pid": pid, "variables": {}})
    for event in events:
        time_before = event.setdefault("time", time_before)
    return events


def guarded(function, also_if_muted: bool = False):
    """Make a hook that never raises: its first failure is an event, later ones are silent."""

    @functools.wraps(function)
    def hook(*args, **kwargs):
        if is_muted() and not also_if_muted:
            return None
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if function.__qualname__ not in _Log.faults:
                _Log.faults.add(function.__qualname__)
                emit("fault", hook=function.__qualname__, message=repr(error))
            return None

    return hook


def line_of_script(skip: int = 1) -> list | None:
    """Return the innermost place in the script's own code, as [file, line, function]."""
    frame = _frame_of_script(skip + 1)
    return frame and [frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name]


def is_in_generator() -> bool:
    """Return True if the innermost function of the script is a generator."""
    frame = _frame_of_script(2)
    return frame is not None and bool(frame.f_code.co_flags & _CO_GENERATOR)


def _frame_of_script(skip: int):
    frame = sys._getframe(skip)
    while frame is not None and not is_own_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


@functools.cache
def is_own_file(name: str) -> bool:
    """Return True if a source file belongs to the script, not to Python or a library."""
    return belongs_to_script(name, LIBRARIES, script_folder())


def belongs_to_script(name: str, libraries: Sequence[str], script_folder: str) -> bool:
    """Return what `is_own_file` returns in a process with these libraries and script folder."""
    if name.startswith(("<", _OBSERVER)):
        return False
    if name.startswith(tuple(libraries)):
        return bool(script_folder) and os.path.abspath(name).startswith(script_folder)
    return f"{os.sep}site-packages{os.sep}" not in name


@functools.cache
def script_folder() -> str:
    """Return the folder of a script that is installed as a library, or "" for all others."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is None or not spec.origin or not spec.parent or spec.parent.startswith("torch"):
        return ""
    return os.path.dirname(os.path.abspath(spec.origin)) + os.sep
