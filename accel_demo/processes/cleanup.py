"""Leave no processes behind: list the stop signals, adopt orphans, and kill process trees."""

import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import psutil

KILL_TIMEOUT = 5  # seconds
SIGNALS = [  # requests to stop: kill, Ctrl-C, a closed terminal, Slurm's warning
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
    if hasattr(signal, name)  # Windows has neither SIGHUP nor SIGUSR1
]


def signals_to_catch() -> list[signal.Signals]:
    """Return `SIGNALS` without the signals from a terminal that this process ignores.

    `nohup` makes a command ignore SIGHUP, and a script makes its background commands ignore SIGINT.
    """
    from_terminal = [number for number in SIGNALS if number.name in ("SIGINT", "SIGHUP")]
    ignored = [number for number in from_terminal if signal.getsignal(number) == signal.SIG_IGN]
    return [number for number in SIGNALS if number not in ignored]


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent exits. Linux only.

    Source: https://man7.org/linux/man-pages/man2/PR_SET_CHILD_SUBREAPER.2const.html
    """
    if sys.platform == "linux":
        PR_SET_CHILD_SUBREAPER = 36
        if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError("this process cannot adopt orphans")


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """Kill the processes. Those that have exited or belong to another user are left out."""
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


def kill_tree(process: subprocess.Popen | psutil.Process) -> None:
    """Kill a process and all its descendants, even those that are not in its process group."""
    started = []
    with suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    kill_all(started)


def kill_descendants(spare_resource_tracker: bool = False) -> None:
    """Kill all descendants of this process, and wait for at most `KILL_TIMEOUT` s until they end.

    A process can start another one while it is being killed, so look for descendants until there
    are none. Suspend them first, so that few of them can do so. If `spare_resource_tracker` is set,
    Python's resource tracker is not killed, because it cleans up after the killed processes.
    """
    deadline = time.monotonic() + KILL_TIMEOUT
    while time.monotonic() < deadline:
        processes = [
            process
            for process in psutil.Process().children(recursive=True)
            if not (spare_resource_tracker and _is_resource_tracker(process))
        ]
        for process in processes:
            with suppress(psutil.Error):
                process.suspend()
        if all(map(has_ended, processes)):
            return
        kill_all(processes)
        time.sleep(0.01)


def _is_resource_tracker(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any("resource_tracker" in word for word in process.cmdline())
    return False


def has_ended(process: psutil.Process) -> bool:
    """Return True if the process has ended, even if its parent has not waited for it yet."""
    with suppress(psutil.Error):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


@contextmanager
def sigterm_raises(error: BaseException | type[BaseException]) -> Iterator[None]:
    """Raise `error` if this process receives SIGTERM, so that `with` and `finally` clean up.

    `KeyboardInterrupt` makes SIGTERM have the same effect as Ctrl-C. SIGHUP has it, too, unless it
    is ignored. If a terminal is closed, SIGHUP may arrive twice, from the system and from the
    shell, so the second one does not interrupt the clean-up.
    """

    def stop(number, frame):
        if signal.Signals(number).name == "SIGHUP":
            for each in handled:
                signal.signal(each, signal.SIG_IGN)
        raise error

    handled = [number for number in signals_to_catch() if number.name in ("SIGTERM", "SIGHUP")]
    earlier = {number: signal.signal(number, stop) for number in handled}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
