"""Remedies for surprises of the libraries and the system, each with its reason and its source."""

import atexit
import ctypes
import gc
import os
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

# DDP imports this module, too. If DDP is the first to do so, the default arguments of the module's
# functions (group=WORLD) keep the process group, and with it its threads, alive until Python has
# ended. See `_end_group_threads_at_exit`.
import torch.distributed.nn.functional  # noqa: F401

from accel_demo.errors import UserError


def keep_freed_memory() -> None:
    """Make this process keep the memory it frees instead of returning it to the system.

    Each training step frees the tensors of the step before and allocates the same sizes again. By
    default the C library returns large blocks to the system, which must then clear and map every
    page again. For a small network on a CPU this takes a good part of each step. In exchange, the
    process stays as large as it ever was. If the C library is not glibc, nothing changes.
    Source: https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    trim_threshold, mmap_threshold = -1, -3  # their numbers in malloc.h; both are set in bytes
    with suppress(AttributeError, TypeError):  # no mallopt: macOS; no C library by name: Windows
        mallopt = ctypes.CDLL(None).mallopt
        if mallopt(mmap_threshold, 2**30) or mallopt(mmap_threshold, 2**25):  # glibc before 2.35
            mallopt(trim_threshold, 2**30)


def skip_the_search_for_lomo() -> None:
    """Stop Accelerate from searching the disk for an optimizer package in each training step.

    Accelerate's `optimizer.step` asks twice whether the package `lomo_optim` is installed, and
    Python looks through every folder of `sys.path` each time. An entry of None in `sys.modules`
    answers no at once. We use no optimizer from that package.
    Source: `is_lomo_available` in accelerate/utils/imports.py
    """
    sys.modules.setdefault("lomo_optim", None)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Turn the garbage collector off: a large import then takes a quarter less time.

    It would find nothing to free. The first optimizer of a process imports torch._dynamo, which
    takes about as long as importing torch.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def fresh_rendezvous(timeout: float) -> dict:
    """Return the arguments of `init_process_group` with which the processes of a launch connect.

    They are the `store` (a key-value store that the launcher keeps), this process's `rank`, the
    `world_size`, and the `timeout` of every collective, here in seconds.

    torchrun can restart all workers if one fails. Its store then still holds the addresses of the
    dead processes, and a new process that reads one of them fails with "connectFullMesh …
    Connection refused". So each start of the workers puts its own prefix before its keys.

    When Python ends, the garbage collector runs once more: see `_end_group_threads_at_exit`.

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

    Rank 0 makes it up. Every other rank stores a question under a random name, and rank 0 answers
    each question it finds, those of earlier starts too, until every rank has confirmed its answer.
    (A count of restarts would be enough on one machine. With several, each launcher counts alone.)
    """
    random_name = uuid.uuid4().hex
    if rank > 0:
        store.set(f"question/{rank}", random_name)
        prefix = store.get(f"answer/{random_name}").decode()  # waits until it is there
        store.set(f"heard/{prefix}/{rank}", "")
        return prefix
    waiting = set(range(1, world_size))
    while waiting:
        for other in sorted(waiting):
            if store.check([f"heard/{random_name}/{other}"]):
                waiting.remove(other)
            elif store.check([f"question/{other}"]):
                question = store.get(f"question/{other}").decode()
                store.set(f"answer/{question}", random_name)
        if waiting and time.monotonic() > deadline:
            raise dist.DistStoreError(f"without rank {', '.join(map(str, sorted(waiting)))}")
        time.sleep(0.01)
    return random_name
