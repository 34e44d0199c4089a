"""Where the processes of a launch meet: a key-value store that also works after a restart."""

import atexit
import gc
import os
import socket
import time
import uuid
from contextlib import suppress
from datetime import timedelta

import psutil
import torch.distributed as dist

# Import torch.distributed.nn.functional before a process group exists. Otherwise DDP imports it
# later, and the default arguments of its functions (group=WORLD) keep the group and its threads
# alive until Python has exited. `_end_group_threads_at_exit` explains why this is a problem.
import torch.distributed.nn.functional  # noqa: F401

from accel_demo.errors import UserError


def join_rendezvous(timeout: float) -> dict:
    """Join the other processes at the launch's store. Also works after an elastic restart.

    Return keyword arguments for `init_process_group`: the launch's key-value `store`, the `rank` of
    this process, the `world_size`, and the `timeout` of every collective. The parameter `timeout`
    is in seconds.

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
        # Send probes while the process waits for an answer: it sends no data then.
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
