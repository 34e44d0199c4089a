"""Share a run's folder: all its processes see it, and no other run uses it.

All processes of a run read and write its folder: each rank saves its random states, and each reads
the checkpoint to resume from. On several machines, the folder must be on shared storage.
"""

import os
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from accel_demo.errors import UserError
from accel_demo.processes.connect import gather_objects, is_main_process
from accel_demo.processes.peers import are_on_several_machines, name_of, own_host

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

SYNC_TIMEOUT = 2  # seconds that shared storage may need to show a new file on another machine
# Seconds for which a machine may still find a renamed folder under its old name: see acdirmax in
# https://man7.org/linux/man-pages/man5/nfs.5.html
RENAME_TIMEOUT = 60


def shared_folder(
    make_folder: Callable[[], tuple[Path, bool]], timeout: float = SYNC_TIMEOUT
) -> Path:
    """Return the folder that `make_folder` returns, after checking that all processes see it.

    `make_folder` also returns whether the folder is new. If not all processes see it within
    `timeout` seconds, a new folder is removed.

    The main process writes a file with a random name, sends the name to the others, and deletes the
    file afterwards. Every process must call this. If `make_folder` raises `UserError` in any
    process, or if a process does not see the file, every process raises `UserError`.
    """
    mark = None
    try:
        with raised_everywhere() as sent:
            folder, is_new = make_folder()
            if is_main_process():
                # A new name, because a machine may remember that an old name did not exist.
                mark = folder / f".seen-by-all-{uuid.uuid4().hex}"
                _touch(mark)
                sent.append(mark.name)
        sees_it = gather_objects(_appears(folder / sent[0], timeout))
    finally:
        if mark:
            mark.unlink(missing_ok=True)
    if all(sees_it):
        return folder
    folders = gather_objects(str(folder.absolute()))
    if is_new:
        with suppress(OSError):  # it is not empty, or another rank has already removed it
            folder.rmdir()
    blind = [rank for rank, sees in enumerate(sees_it) if not sees]
    raise UserError(
        f"{name_of(blind)} {'does' if len(blind) == 1 else 'do'} not see the run folder "
        f"{folders[0]} of {name_of([0])}. Choose a --run-dir on storage that all machines share."
    )


class FolderLock:
    """A lock on a folder, which is released when this object is deleted."""

    def __init__(self, descriptor: int):
        weakref.finalize(self, os.close, descriptor)


def lock_folder(folder: Path) -> FolderLock | None:
    """Lock the folder. Raises `UserError` if another process has locked it or is renaming it.

    We do not use `flock`, because loader workers would inherit the lock. If the run was killed, any
    worker that is still running would keep the folder locked. On Windows, nothing is locked.
    """
    if fcntl is None:
        return None
    path = folder / ".lock"
    in_use = UserError(
        f"another process is training in {folder}. Wait until it has exited, or choose a different "
        "--run-dir."
    )
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    except FileNotFoundError:  # another process is renaming the folder: see `keep_finished`
        raise in_use from None
    lock = FolderLock(descriptor)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another process may have renamed the folder since we opened the file.
        if not os.path.samestat(os.fstat(descriptor), os.stat(path)):
            raise BlockingIOError
    except (BlockingIOError, PermissionError, FileNotFoundError):
        raise in_use from None
    return lock


@contextmanager
def raised_everywhere() -> Iterator[list[str]]:
    """If the block raises `UserError` in any process, raise it in every process.

    The block can append strings to the list. After the block, the list contains the strings of all
    processes, in rank order.
    """
    problem, strings = "", []
    try:
        yield strings
    except UserError as error:
        problem = str(error)
    gathered = gather_objects((problem, strings, own_host()))
    strings[:] = [string for _, of_rank, _ in gathered for string in of_rank]
    problems = [(problem, host) for problem, _, host in gathered if problem]
    if problems:
        problem, host = problems[0]
        is_local = are_on_several_machines() and len(problems) < len(gathered)
        raise UserError(f"{host}: {problem}" if is_local else problem)


def _touch(path: Path) -> None:
    try:
        path.touch()
    except OSError as error:
        raise UserError(
            f"cannot write to {path.parent} ({error.strerror}). Choose a different --run-dir."
        ) from None


def _appears(path: Path, timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
