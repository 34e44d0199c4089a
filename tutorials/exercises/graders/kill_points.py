"""Call a function in a forked process, and kill the process at a chosen file operation.

A kill point is the moment before a process opens, renames, creates or deletes a file or folder, and
the moments before and in the middle of each write. Writes by C and C++ code are not kill points,
but a comparison of the files after the call finds them.
"""

import _pyio
import builtins
import io
import multiprocessing
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grading
from grading import NotFinished, Wrong

PATIENCE = float(os.environ.get("ACCEL_DEMO_PATIENCE", 20))  # seconds for one call
PROCESSES = multiprocessing.get_context("fork")


@dataclass
class Kill:
    """The next kill: the process is killed at point number `at`, counted from 1."""

    at: int  # 0: do not kill the process
    folder: Path
    send: Callable[[str], None]
    points: int = 0


kill: Kill | None = None  # only in a process that calls `save`
write = os.write
bytes_written: Counter[int] = Counter()  # by os.write, per inode


def call_in_process(
    function: Callable, call: str, folder: Path, kill_at: int | None = None
) -> tuple[str | None, dict]:
    """Call `function` in a forked process. Return where it was killed, or None, and its report.

    The process is killed at kill point number `kill_at`, counted from 1. If `kill_at` is 0, it is
    not killed, but every write must still be a kill point. If it is None, writes may bypass them.
    """
    receiver, sender = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=_call, args=(sender, function, call, folder, kill_at))
    process.start()
    sender.close()
    try:
        if not receiver.poll(PATIENCE):
            raise NotFinished(
                f"{call} has not finished after {PATIENCE:g} s: is there an infinite loop, or is "
                "it waiting for something that a killed save left behind?"
            )
        killed, report = receiver.recv()
    except EOFError:
        process.join()
        raise Wrong(f"{call} ended the process with exit code {process.exitcode}") from None
    finally:
        if sys.exc_info()[0] is not None:
            process.kill()
        process.join(PATIENCE)
        receiver.close()
    return killed, report


def _call(sender, function: Callable, call: str, folder: Path, kill_at: int | None) -> None:
    global kill
    if kill_at is not None:
        install()
        kill = Kill(kill_at, folder, lambda where: sender.send((where, {})))
    before = contents(folder)
    report = grading.fill_in({}, function, failure=f"{call} fails")
    if kill and not report["mistake"] and (path := changed_without_open(folder, before)):
        report["mistake"] = (
            f"save changes {relative(path)} without Python's built-in open(...), so the check "
            "cannot kill it in the middle of a write. Open the file with open(...), and pass "
            "the file object on"
        )
    kill = None
    sender.send((None, report))


def install() -> None:
    """Make every file operation of this process a kill point."""
    # The Python versions of `open` and the file classes write with os.write.
    builtins.open = io.open = _pyio.open  # type: ignore[assignment]
    os.write = write_in_halves
    shutil._USE_CP_SENDFILE = False  # type: ignore[attr-defined]  # copy with os.write
    sys.addaudithook(on_event)


def contents(folder: Path) -> dict[int, bytes]:
    """Return the content of each file in the folder, by inode."""
    return {path.stat().st_ino: path.read_bytes() for path in files_in(folder)}


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def changed_without_open(folder: Path, before: dict[int, bytes]) -> Path | None:
    """Return a file with new bytes that were not written by os.write, for example by C++ code."""
    for path in files_in(folder):
        inode, content = path.stat().st_ino, path.read_bytes()
        old = before.get(inode, b"")
        is_same = old.startswith(content)  # or shorter
        if not is_same and bytes_written[inode] < max(1, len(content) - len(old)):
            return path
    return None


def on_event(event: str, arguments: tuple) -> None:
    """Count the operations that change files. Python calls this before each of them."""
    if kill is None or event not in EVENTS:
        return
    if event == "open":
        path, _, flags = arguments
        if not isinstance(path, str | bytes) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
    kill_point(EVENTS[event].format(*(relative(argument) for argument in arguments)))


EVENTS = {  # {audit event: description of the moment before it}
    "open": "before it opened {0} for writing",
    "os.mkdir": "before it created the folder {0}",
    "os.rename": "before it renamed {0} to {1}",
    "os.remove": "before it deleted {0}",
    "os.rmdir": "before it deleted the folder {0}",
    "os.link": "before it linked {0} to {1}",
    "os.symlink": "before it linked {0} to {1}",
    "os.truncate": "before it truncated {0}",
    "shutil.copyfile": "before it copied {0} to {1}",
    "subprocess.Popen": "before it started {0}",
}


def write_in_halves(descriptor: int, content) -> int:
    if kill is None or len(content) < 2:
        return counted_write(descriptor, content)
    kill_point(f"before it wrote to {name_of(descriptor)}")
    content = memoryview(content).cast("B")
    half = len(content) // 2
    if counted_write(descriptor, content[:half]) < half:
        raise OSError("the disk is full")
    kill_point(f"in the middle of a write to {name_of(descriptor)}")
    return half + counted_write(descriptor, content[half:])


def counted_write(descriptor: int, content) -> int:
    size = write(descriptor, content)
    bytes_written[os.fstat(descriptor).st_ino] += size
    return size


def kill_point(where: str) -> None:
    """Count a kill point, and kill this process with SIGKILL if it is the chosen one."""
    assert kill is not None
    kill.points += 1
    if kill.points == kill.at:
        kill.send(where)
        os.kill(os.getpid(), signal.SIGKILL)


def name_of(descriptor: int) -> str:
    try:
        return relative(os.readlink(f"/proc/self/fd/{descriptor}"))
    except OSError:  # not Linux
        return "a file"


def relative(path) -> str:
    """Return a path relative to the folder with the checkpoints."""
    assert kill is not None
    text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else str(path)
    return text.removeprefix(f"{kill.folder}/")
