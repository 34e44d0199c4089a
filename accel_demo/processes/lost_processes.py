"""Report in one line which process of a training run has died or is stuck."""

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import torch.distributed as dist

from accel_demo.errors import UserError, say
from accel_demo.processes import signals
from accel_demo.processes.cleanup import kill_descendants
from accel_demo.processes.peers import (
    are_on_several_machines,
    name_of,
    own_machine,
    peer_of,
    store_host,
)

# Words in the RuntimeError that a gloo or NCCL collective raises if a process has died or is late.
KEYWORDS = ("gloo", "NCCL", "pair closure", "Connection closed", "Connection reset", "Broken pipe")
NOTICE_TIMEOUT = 5  # seconds to wait for the remaining processes to notice the loss


@contextmanager
def report_lost_processes() -> Iterator[None]:
    """Print one line and exit with code 1 if a collective fails because a process died or is stuck.

    Raises `UserError` if the processes could not connect.
    """
    try:
        yield
    except RuntimeError as error:
        if line := could_not_connect(error):
            raise UserError(line) from None
        line = lost_processes(error)
        if line is None:
            raise
        print_and_exit(line)


def lost_processes(error: RuntimeError) -> str | None:
    """Return one line about the missing processes, or None if `error` has a different cause.

    Each remaining process records in the store that it has noticed the loss. A process without such
    a record is missing. The remaining process with the lowest rank returns the line, and the other
    processes return an empty string.
    """
    message = str(error)
    if not _is_about_processes(error) or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    timed_out = "imed out" in message or "imeout" in message
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    where = _failed_line(error)
    store = dist.distributed_c10d._get_default_store()
    try:
        store.set(f"left/{rank}", where)
        store.check([f"left/{rank}"])
        store.set(f"noticed/{rank}", "")  # from now on, the process that hosts the store may exit
    except dist.DistError:
        return _report_lost_store(rank, where)
    try:
        missing = _missing_ranks(store, ranks, timed_out)
    except dist.DistError:  # the process that hosts the store has printed the line and exited
        return ""
    if min(set(ranks) - set(missing)) != rank:
        return ""
    if not missing:
        return f"all processes are running, but training failed {where}: {message.splitlines()[0]}"
    if rank == 0 and not _launcher_hosts_store():
        _keep_store_until_noticed(store, [other for other in ranks if other not in missing])
    what = "has" if len(missing) == 1 else "have"
    silent = timed_out and not any(_has_died(other) for other in missing)
    what += " not answered within --collective-timeout, and may be stuck" if silent else " died"
    if are_on_several_machines() and silent:
        what += " or cut off from the network"
    elif not all(_is_on_this_machine(other) for other in missing):
        # Perhaps another rank timed out first and closed its connections.
        what += ", or cannot be reached"
    return (
        f"{name_of(missing)} {what}; {name_of([rank])} noticed this {where}. "
        "Continue with --resume auto."
    )


def _report_lost_store(rank: int, where: str) -> str:
    """Return one line about the process that hosts the store, because it has died or is cut off.

    The remaining processes can no longer coordinate. The one with the lowest rank on its machine
    returns the line at once. The others wait, because their launcher usually stops them now. If the
    store is on another machine, and the launcher on this one has already told this process to stop,
    another process on this machine has returned the line.
    """
    if are_on_several_machines() and signals.was_asked:
        return ""
    store_process = "the launcher" if _launcher_hosts_store() else "rank 0"
    first = 0 if _launcher_hosts_store() else 1
    here = [other for other in range(first, dist.get_world_size()) if _is_on_this_machine(other)]
    if here and rank != here[0]:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # there is no step to finish
        time.sleep(NOTICE_TIMEOUT)
    what = f"{store_process} has died"
    if are_on_several_machines():
        what = f"{store_process} on {store_host()} has died, or cannot be reached"
    return f"{what}; {name_of([rank])} noticed this {where}. Continue with --resume auto."


def _launcher_hosts_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _keep_store_until_noticed(store, remaining: list[int]) -> None:
    """Wait until all `remaining` ranks have noticed the loss, for at most `NOTICE_TIMEOUT` seconds.

    This process hosts the store. If it exited too early, the others would report that rank 0 has
    died. A rank that is still waiting for data from this process has not noticed the loss. We close
    all connections to other ranks, so that the collective of such a rank fails.
    """
    port = int(os.environ["MASTER_PORT"])  # the store's port
    with suppress(psutil.Error):
        for connection in psutil.Process().net_connections("tcp"):
            if connection.raddr and port not in (connection.laddr.port, connection.raddr.port):
                with suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as gloo:
                    gloo.shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + NOTICE_TIMEOUT
    while time.monotonic() < deadline:
        if store.check([f"noticed/{rank}" for rank in remaining]):
            return
        time.sleep(0.01)


def could_not_connect(error: RuntimeError) -> str | None:
    """Return one line if `error` means that some processes could not connect, otherwise None."""
    frames = traceback.extract_tb(error.__traceback__)
    is_connecting = any(frame.name == "init_process_group" for frame in frames)
    if is_connecting and _is_about_processes(error):
        return f"the processes of this launch could not connect ({str(error).splitlines()[0]})"
    return None


def _is_about_processes(error: RuntimeError) -> bool:
    """Return True if the cause of the error is a dead or late process rather than a bug."""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in KEYWORDS)


def print_and_exit(line: str) -> None:
    """Print the line, kill the loader workers, and exit immediately with code 1.

    A clean shutdown of the broken process group would wait for the processes that have died.
    """
    if line:
        say(f"\nerror: {line}")  # start a new line below any progress bar
    sys.stdout.flush()
    kill_descendants()
    os._exit(1)


def _missing_ranks(store, ranks: range, may_hang: bool) -> list[int]:
    """Return the ranks that have died on this machine or, if there are none, on other machines.

    Ranks can have died even if the collective timed out: gloo does not notice a death that occurs
    while it sends a message to that rank.
    https://github.com/pytorch/gloo/blob/main/gloo/transport/tcp/pair.cc (`signalException`)

    A silent rank has not recorded the loss, but may be alive: while it waits for a second rank, it
    does not notice that a third rank has died until the second rank exits. Of the silent ranks on
    other machines, we do not know which are alive, so all of them are returned. If `may_hang` is
    true and none has died on this machine, all silent ranks are returned.
    """
    deadline = time.monotonic() + NOTICE_TIMEOUT
    while True:
        silent = [rank for rank in ranks if not store.check([f"left/{rank}"])]
        dead = [rank for rank in silent if _has_died(rank)]
        # Check again: a rank may have recorded the loss and exited in the meantime.
        dead = [rank for rank in dead if not store.check([f"left/{rank}"])]
        if dead:
            return dead
        if not silent or time.monotonic() > deadline:
            elsewhere = [rank for rank in silent if not _is_on_this_machine(rank)]
            return silent if may_hang else elsewhere or silent
        time.sleep(0.1)


def _is_on_this_machine(rank: int) -> bool:
    """Return True if the process with this rank is on this machine."""
    peer = peer_of(rank)
    return peer is not None and peer.machine == own_machine()


def _has_died(rank: int) -> bool:
    """Return True if the process is known to have died. Only this machine's processes are known."""
    peer = peer_of(rank)
    if peer is None or not _is_on_this_machine(rank):
        return False
    try:
        return psutil.Process(peer.pid).status() == "zombie"
    except psutil.NoSuchProcess:
        return True


def _failed_line(error: RuntimeError) -> str:
    """Return the line of `main` that failed, such as "at `accelerator.backward(loss)`"."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.line or "" for frame in frames if frame.name == "main"]
    return f"at `{lines[-1].split('  # ')[0]}`" if lines else "in a collective"
