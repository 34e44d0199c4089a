"""Notice other programs that use the processor while a command measures.

Their time is that of the whole machine, less that of this command and all processes that it has
started. On a virtual machine, the host may also give the processor to others ("stolen" time).
"""

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

LEAST_CORES = 0.2  # that others use; on an idle machine, it is below 0.1
LEAST_SHARE = 0.75  # of all cores in use; otherwise, there is room for this command
PRESSURE = Path("/proc/pressure/cpu")  # of Linux: how long processes have waited for a core


@dataclass(frozen=True)
class Load:
    """How much of the processor was in use: mean numbers of cores, from the start of a command.

    `stolen` is what the host of a virtual machine has used for others. `waiting` is the share of
    the time in which a process, also one of this command, has waited for a core (0.0 if the
    operating system does not say).
    """

    seconds: float
    own: float
    others: float
    stolen: float
    waiting: float
    is_busy: bool

    @property
    def warning(self) -> str:
        """Return a sentence about a busy machine, or ""."""
        if not self.is_busy:
            return ""
        parts = [f"other programs used {self.others:.1f} of {os.cpu_count()} cores"]
        parts += [f"the host took {self.stolen:.1f} away"] if self.stolen >= 0.1 else []
        return f"busy machine: {' and '.join(parts)}"


class LoadWatch:
    """Compares the processor times of the machine now with those when the watch was started."""

    def __init__(self) -> None:
        self.begun = _times()

    def load(self) -> Load:
        before, now = self.begun, _times()
        seconds = max(1e-9, now.clock - before.clock)
        own = (now.own - before.own) / seconds
        others = max(0.0, (now.used - before.used) / seconds - own)
        stolen = (now.stolen - before.stolen) / seconds
        taken, cores = others + stolen, os.cpu_count() or 1
        is_busy = taken >= LEAST_CORES and own + taken >= LEAST_SHARE * cores
        waiting = (now.waiting - before.waiting) / seconds
        return Load(seconds, own, others, stolen, waiting, is_busy)


@dataclass(frozen=True)
class _Times:
    """Seconds on the clock, and of processor time since the machine or the process was started."""

    clock: float
    used: float
    stolen: float
    own: float
    waiting: float


def _times() -> _Times:
    machine = psutil.cpu_times()
    idle = {"idle", "iowait", "steal", "guest", "guest_nice"}  # guests are a part of user
    used = sum(value for name, value in machine._asdict().items() if name not in idle)
    stolen = getattr(machine, "steal", 0.0)
    return _Times(time.monotonic(), used, stolen, _own_time(), _waiting_time())


def _own_time() -> float:
    """Return the processor time of this process and of all that it has started, directly or not."""
    here = psutil.Process()
    total = 0.0
    for process in [here, *here.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:  # it has just ended: its parent knows its time
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def _waiting_time() -> float:
    """Return how long at least one process of the machine has waited for a core, in seconds."""
    try:
        words = PRESSURE.read_text(encoding="utf-8").split()
    except OSError:
        return 0.0
    return float(words[words.index("some") + 4].removeprefix("total=")) / 1e6


_watch: list[LoadWatch] = []  # of the command that is running


def begin() -> None:
    """Start to watch, at the beginning of a command."""
    _watch[:] = [LoadWatch()]


def now() -> dict | None:
    """Return the load since `begin` for the JSON, or None if nothing is watched."""
    return asdict(_watch[0].load()) if _watch else None


def warning() -> str:
    """Return a sentence about a busy machine, or ""."""
    return _watch[0].load().warning if _watch else ""
