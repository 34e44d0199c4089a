"""Work around problems in the libraries and the operating system."""

import atexit
import ctypes
import gc
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import psutil
import torch.distributed as dist

# Import torch.distributed.nn.functional before a process group exists. Otherwise DDP imports it
# later, and the default arguments of its functions (group=WORLD) keep the group and its threads
# alive until Python has exited. `_end_group_threads_at_exit` explains why this is a problem.
import torch.distributed.nn.functional  # noqa: F401

from accel_demo.errors import UserError


def keep_freed_memory() -> None:
    """Make this process reuse the memory that it frees, instead of returning it to the system.

    Each training step frees the tensors of the previous step and allocates new ones of the same
    sizes. By default, the C library returns large blocks to the system, which must clear and map
    their pages again at the next allocation. For a small network on a CPU, this takes a large part
    of each step's time. The drawback of keeping the memory is that the process never shrinks.
    Without glibc, the function has no effect.
    Source: https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    m_trim_threshold, m_mmap_threshold = -1, -3  # option numbers from malloc.h
    with suppress(AttributeError, TypeError):  # no mallopt on macOS, no CDLL(None) on Windows
        mallopt = ctypes.CDLL(None).mallopt
        # Versions of glibc before 2.35 reject values above 2**25.
        if mallopt(m_mmap_threshold, 2**30) or mallopt(m_mmap_threshold, 2**25):
            mallopt(m_trim_threshold, 2**30)


def skip_the_search_for_lomo() -> None:
    """Stop Accelerate from searching the disk for an optimizer package in each training step.

    Accelerate's `optimizer.step` checks twice whether the package `lomo_optim` is installed, and
    each check searches every folder in `sys.path`. If the package's entry in `sys.modules` is None,
    Python does not search. We do not use this package.
    Source: `is_lomo_available` in accelerate/utils/imports.py
    """
    sys.modules.setdefault("lomo_optim", None)  # pyright: ignore[reportArgumentType]


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector, so that a large import in this block is a quarter faster.

    The collector would find nothing to free. Creating the first optimizer in a process triggers
    such an import: torch._dynamo, which takes about as long to import as torch itself.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def safe_start_of_workers(stop_signals: Collection[int], preloaded: list[str]) -> dict:
    """Return DataLoader options that prevent workers from hanging when they start.

    By default, workers are forked from this process. Before Python 3.11.10, a worker hangs if
    another thread starts to run Python code during the fork, because the worker inherits a lock
    that is never released. Gloo's threads run Python code shortly after each collective, to release
    its tensors. So if a process group exists, we fork the workers from a server without such
    threads, as Python 3.14 does by default. The server imports the modules `preloaded` once, and
    blocks `stop_signals`.
    Source: https://github.com/python/cpython/issues/112275
    """
    if sys.version_info >= (3, 11, 10) or sys.platform != "linux" or not dist.is_initialized():
        return {}
    multiprocessing.set_forkserver_preload(preloaded)
    multiprocessing.resource_tracker.ensure_running()  # if started later, it would unblock SIGINT
    # The server and the workers inherit the blocked signals. Otherwise SIGTERM would kill workers
    # that the training process needs to finish its step.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals)
    multiprocessing.forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    return {"multiprocessing_context": "forkserver"}


def fresh_rendezvous(timeout: float) -> dict:
    """Return keyword arguments for `init_process_group` that also work after an elastic restart.

    The arguments are the launch's key-value `store`, the `rank` of this process, the `world_size`,
    and the `timeout` of every collective. The parameter `timeout` is in seconds.

    If one worker fails, torchrun can restart all workers. After a restart, the store still contains
    the addresses of the dead processes, and a new process that reads such an address fails with
    "connectFullMesh … Connection refused". Therefore each start adds a new prefix to the keys.

    This function also limits how long the process waits for a store that it can no longer reach,
    and makes Python collect garbage at exit: see `_end_group_threads_at_exit`.

    Raises `UserError` if some processes are still missing after `timeout` seconds.
    """
    patience = timedelta(seconds=timeout)
    try:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=patience))
        _limit_wait_for_store(timeout)
        prefix = _prefix_of_this_start(store, rank, world_size, time.monotonic() + timeout)
    except dist.DistError as error:
        raise UserError(
            f"the {os.environ['WORLD_SIZE']} processes of this launch did not all connect within "
            f"{timeout:g} s ({str(error).splitlines()[0]})"
        ) from None
    store = dist.PrefixStore(prefix, store)
    _end_group_threads_at_exit()
    return {"store": store, "rank": rank, "world_size": world_size, "timeout": patience}


def _limit_wait_for_store(seconds: float) -> None:
    """Make requests to the store fail if its machine cannot be reached for `seconds`.

    Without this, a request over a dead link waits until the kernel gives up, which takes about 15
    minutes. A working link is not limited: the kernel of the store's machine confirms every request
    at once, even if the store itself answers later. This has an effect only on Linux.
    Source: https://man7.org/linux/man-pages/man7/tcp.7.html
    """
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    pause = max(1, int(seconds / 3))
    options = {
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): max(1, int(seconds * 1000)),
        # Send probes while the process waits for an answer, because then no data is on its way.
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): min(pause, 32767),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): min(pause, 32767),
    }
    port, connections = int(os.environ["MASTER_PORT"]), []
    with suppress(psutil.Error):
        connections = psutil.Process().net_connections("tcp")
    for connection in connections:
        if connection.raddr and connection.raddr.port == port:
            with suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as to_store:
                for (level, option), value in options.items():
                    to_store.setsockopt(level, option, value)


def _end_group_threads_at_exit() -> None:
    """End the threads of a destroyed process group before Python exits.

    A gloo thread releases the tensors of a collective shortly after the collective has returned,
    and needs Python's global lock (the GIL) to do so. If Python is already shutting down, the
    process aborts with "terminate called without an active exception". Under load, this happens
    once in hundreds of launches. The threads end when the last reference to the group is dropped.
    DDP keeps a reference to the group, and if the DDP model is part of a reference cycle, only the
    garbage collector can free the model. So we run the collector at exit.
    Source: https://github.com/pytorch/pytorch/pull/179291
    """
    atexit.register(gc.collect)


def _prefix_of_this_start(store: dist.Store, rank: int, world_size: int, deadline: float) -> str:
    """Agree with the other ranks on a key prefix that no earlier start has used.

    Rank 0 chooses a random prefix. Every other rank writes a question with a random ID, and waits
    for the answer with the same ID. Rank 0 cannot tell whether a question is from this start or an
    earlier one, so it answers every question until all ranks have confirmed the prefix. (On one
    machine, the number of restarts could be the prefix. But on several machines, each launcher
    counts only its own restarts.)
    """
    if rank > 0:
        question = uuid.uuid4().hex
        store.set(f"question/{rank}", question)
        prefix = store.get(f"answer/{question}").decode()  # blocks until rank 0 has answered
        store.set(f"received/{prefix}/{rank}", "")
        return prefix
    prefix = uuid.uuid4().hex
    waiting = set(range(1, world_size))
    while waiting:
        for other in sorted(waiting):
            if store.check([f"received/{prefix}/{other}"]):
                waiting.remove(other)
            elif store.check([f"question/{other}"]):
                question = store.get(f"question/{other}").decode()
                store.set(f"answer/{question}", prefix)
        if waiting and time.monotonic() > deadline:
            raise dist.DistStoreError(f"missing ranks: {', '.join(map(str, sorted(waiting)))}")
        time.sleep(0.01)
    return prefix
