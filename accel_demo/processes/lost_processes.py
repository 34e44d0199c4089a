"""Notice that another process is gone, and say which one in one line."""

import os
import platform
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch.distributed as dist

from accel_demo.errors import UserError, say

# What gloo and NCCL say when another process is gone or late; torch passes it on as RuntimeError.
SIGNS = ("gloo", "NCCL", "pair closure", "Connection closed", "Connection reset", "Broken pipe")
TRAIN_FILES = ("train.py", "train_plain.py", "train_dp.py", "train_ddp.py")
PATIENCE = 5  # seconds, for others to notice the loss too


@contextmanager
def report_lost_processes() -> Iterator[None]:
    """Turn the error of a collective into one line and exit code 1 if another process is gone.

    If the processes could not even connect, raise `UserError`.
    """
    try:
        yield
    except RuntimeError as error:
        if line := could_not_connect(error):
            raise UserError(line) from None
        line = lost_processes(error)
        if line is None:
            raise
        leave(line)


def lost_processes(error: RuntimeError) -> str | None:
    """One line on which process is gone or stuck, where `error` comes from a collective.

    The processes that have noticed tell each other so in the store where they have met; who does
    not is missing. Only the first of those that are left gives the line; the others give "".
    """
    said = str(error)
    if not _is_about_processes(error) or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    timed_out = "imed out" in said or "imeout" in said
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    where = _place_in_the_training(error)
    store = dist.distributed_c10d._get_default_store()
    try:
        store.set(f"left/{rank}", where)
        store.check([f"left/{rank}"])
    except dist.DistError:
        keeper = "the launcher" if "TORCHELASTIC_RUN_ID" in os.environ else "rank 0"
        return f"{keeper} has died; rank {rank} noticed {where}. Go on with --resume auto"
    try:
        missing = _missing(store, ranks, timed_out)
    except dist.DistError:  # the process that keeps the store has given the line, and left
        return ""
    if min(set(ranks) - set(missing)) != rank:
        return ""
    if not missing:
        return f"all processes are there, but failed {where}: {said.splitlines()[0]}"
    names = ", ".join(str(number) for number in missing)
    names = f"rank {names} has" if len(missing) == 1 else f"ranks {names} have"
    what = "not answered within --collective-timeout, and may hang" if timed_out else "died"
    return f"{names} {what}; rank {rank} noticed {where}. Go on with --resume auto"


def could_not_connect(error: RuntimeError) -> str | None:
    """Return one line if `init_process_group` raised `error` because a process was missing."""
    frames = traceback.extract_tb(error.__traceback__)
    is_connecting = any(frame.name == "init_process_group" for frame in frames)
    if is_connecting and _is_about_processes(error):
        return f"the processes of this launch could not connect ({str(error).splitlines()[0]})"
    return None


def _is_about_processes(error: RuntimeError) -> bool:
    """True if the error is that another process is gone or late, rather than a bug."""
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in SIGNS)


def leave(line: str) -> None:
    """End this process and its loader workers at once, with exit code 1.

    Its process group is broken: taking it down in order would wait for the ones that are gone.
    """
    if line:
        say(f"\nerror: {line}")  # a line of its own: the progress bar of rank 0 may stand there
    sys.stdout.flush()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(1)


def _missing(store, ranks: range, may_hang: bool) -> list[int]:
    """The ranks that have died, as far as this machine can tell; else those that stay silent.

    One that waits for a rank that is still there does not notice a third one's death: it is silent
    until the other leaves, and must not be taken for dead.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        silent = [rank for rank in ranks if not store.check([f"left/{rank}"])]
        dead = [rank for rank in silent if _has_died(store, rank)]
        # One that has noticed the loss, too, may have left since: it has said so before it did.
        dead = [rank for rank in dead if not store.check([f"left/{rank}"])]
        if dead and not may_hang:
            return dead
        if not silent or time.monotonic() > deadline:
            return silent
        time.sleep(0.1)


def _has_died(store, rank: int) -> bool:
    if not store.check([f"process/{rank}"]):
        return False
    host, pid = store.get(f"process/{rank}").decode().split()
    try:
        return host == platform.node() and psutil.Process(int(pid)).status() == "zombie"
    except psutil.NoSuchProcess:
        return True


def _place_in_the_training(error: RuntimeError) -> str:
    """The collective's place: the line of a train file, "at `accelerator.backward(loss)`"."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.line for frame in frames if Path(frame.filename).name in TRAIN_FILES]
    return f"at `{lines[-1]}`" if lines else "in a collective"
