"""Workarounds for surprises in the libraries and the system, each with its reason and source."""

import atexit
import ctypes
import gc
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

# Import this before a process group exists. Otherwise DDP imports it later, and the default
# arguments of its functions (group=WORLD) keep the process group and its threads alive until Python
# has ended. See `_end_group_threads_at_exit`.
import torch.distributed.nn.functional  # noqa: F401

from accel_demo.errors import UserError


def keep_freed_memory() -> None:
    """Make this process keep the memory it frees instead of returning it to the system.

    Each training step frees the tensors of the step before and allocates the same sizes again. By
    default, the C library returns large blocks to the system, which must then clear and map every
    page again. For a small network on a CPU, this takes a large part of each step. The price is
    that the process never shrinks. If the C library is not glibc, nothing changes.
    Source: https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    m_trim_threshold, m_mmap_threshold = -1, -3  # option numbers from malloc.h
    with suppress(AttributeError, TypeError):  # macOS has no mallopt, Windows no C library by name
        mallopt = ctypes.CDLL(None).mallopt
        # A glibc before 2.35 refuses more than 2**25.
        if mallopt(m_mmap_threshold, 2**30) or mallopt(m_mmap_threshold, 2**25):
            mallopt(m_trim_threshold, 2**30)


def skip_the_search_for_lomo() -> None:
    """Stop Accelerate from searching the disk for an optimizer package in each training step.

    Accelerate's `optimizer.step` asks twice whether the package `lomo_optim` is installed, and
    Python searches every folder of `sys.path` each time. With an entry of None in `sys.modules`,
    the search ends at once. We use no optimizer from that package.
    Source: `is_lomo_available` in accelerate/utils/imports.py
    """
    sys.modules.setdefault("lomo_optim", None)  # pyright: ignore[reportArgumentType]


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Turn the garbage collector off during a large import, which makes it a quarter faster.

    The collector would find nothing to free. Creating the first optimizer of a process is such an
    import: it imports torch._dynamo, which takes about as long as importing torch.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def safe_start_of_workers(stop_signals: Collection[int], preloaded: list[str]) -> dict:
    """Return the options with which a DataLoader starts its workers so that none of them hangs.

    Normally, workers are forked from this process. Before Python 3.11.10, this can fail if a thread
    enters Python at the same moment, as a thread of gloo does shortly after a collective to release
    its tensors. The worker then inherits a lock that is never released, and waits for it. So if the
    processes are connected, the workers are forked from a server that has no such threads, which is
    what Python 3.14 always does. The server imports the modules `preloaded` once. Like the workers,
    it ignores `stop_signals`.
    Source: https://github.com/python/cpython/issues/112275
    """
    if sys.version_info >= (3, 11, 10) or sys.platform != "linux" or not dist.is_initialized():
        return {}
    multiprocessing.set_forkserver_preload(preloaded)
    multiprocessing.resource_tracker.ensure_running()  # or else the next call unblocks SIGINT
    # The server inherits the blocked signals. Otherwise SIGTERM would end it and its workers, which
    # the training process still needs until the end of its step.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals)
    multiprocessing.forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    return {"multiprocessing_context": "forkserver"}


def fresh_rendezvous(timeout: float) -> dict:
    """Return the arguments of `init_process_group` for the processes of a launch.

    They are the `store` (a key-value store that the launcher keeps), the `rank` of this process,
    the `world_size`, and the `timeout` of every collective. The parameter `timeout` is in seconds.

    torchrun can restart all workers if one fails. Its store then still holds the addresses of the
    dead processes, and a new process that reads one of them fails with "connectFullMesh …
    Connection refused". So each time the workers start, their keys get a new prefix.

    The garbage collector will run when Python exits: see `_end_group_threads_at_exit`.

    Raises `UserError` if not all processes arrive within `timeout` seconds.
    """
    patience = timedelta(seconds=timeout)
    try:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=patience))
        prefix = _prefix_of_this_start(store, rank, world_size, time.monotonic() + timeout)
    except dist.DistError as error:
        raise UserError(
            f"the {os.environ['WORLD_SIZE']} processes of this launch have not all met within "
            f"{timeout:g} s ({str(error).splitlines()[0]})"
        ) from None
    store = dist.PrefixStore(prefix, store)
    _end_group_threads_at_exit()
    return {"store": store, "rank": rank, "world_size": world_size, "timeout": patience}


def _end_group_threads_at_exit() -> None:
    """End the threads of a destroyed process group before Python ends.

    A thread of gloo releases the tensors of a collective shortly after the collective has returned,
    and needs Python's lock (the GIL) to do so. If Python is already shutting down, the process
    aborts with "terminate called without an active exception", once in hundreds of launches under
    load. The threads end with the last reference to the group, and DDP has one. If its model is
    part of a reference cycle, only the garbage collector drops it.
    Source: https://github.com/pytorch/pytorch/pull/179291
    """
    atexit.register(gc.collect)


def _prefix_of_this_start(store: dist.Store, rank: int, world_size: int, deadline: float) -> str:
    """Agree on a prefix that no earlier start of the workers has used.

    Rank 0 draws the prefix. Every other rank writes a question with a random number, and waits for
    the answer with this number. Rank 0 cannot distinguish questions of this start from questions of
    an earlier one, so it answers all of them until every rank has confirmed that it received the
    prefix. (On one machine a count of restarts would do, but each launcher has its own count.)
    """
    if rank > 0:
        question = uuid.uuid4().hex
        store.set(f"question/{rank}", question)
        prefix = store.get(f"answer/{question}").decode()  # waits until it is there
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
            raise dist.DistStoreError(f"rank {', '.join(map(str, sorted(waiting)))} is missing")
        time.sleep(0.01)
    return prefix
