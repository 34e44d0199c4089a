"""The machine, host name and process ID of every rank.

If a network fails, a process can no longer read the store. So each process keeps the names of all
hosts, and an error message can name the machine that does not answer.
"""

import os
import platform
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist


@dataclass(frozen=True)
class Peer:
    """A process of this launch. `can_host_store` is true if the store is on the same machine."""

    machine: str  # see `own_machine`
    host: str
    pid: int
    can_host_store: bool


_peers: list[Peer] = []  # by rank


def exchange_process_ids() -> None:
    """Send this rank's machine, host name and process ID to all others, and keep theirs.

    Every rank must call this after the processes have been connected.
    """
    store, ranks = dist.distributed_c10d._get_default_store(), range(dist.get_world_size())
    record = f"{own_machine()} {own_host()} {os.getpid()} {int(_store_is_here())}"
    store.set(f"process/{dist.get_rank()}", record)
    records = store.multi_get([f"process/{rank}" for rank in ranks])  # waits for all of them
    words = [record.decode().split() for record in records]
    _peers[:] = [Peer(machine, host, int(pid), here == "1") for machine, host, pid, here in words]


def own_host() -> str:
    return platform.node() or "-"


def own_machine() -> str:
    """Return an identifier of this machine or container.

    The host name is not enough: copies of a virtual machine may share it, and differ only in the ID
    of their last boot. In each container, the same process ID means a different process.
    """
    parts = [own_host()]
    with suppress(OSError):  # only Linux has these files
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return "/".join(parts)


def peer_of(rank: int) -> Peer | None:
    """Return a rank's process, or None if this process has not called `exchange_process_ids`."""
    return _peers[rank] if rank < len(_peers) else None


def are_on_several_machines() -> bool:
    return len({peer.machine for peer in _peers}) > 1


def store_host() -> str:
    """Return the host of the store, or its address if none of the processes is on that host."""
    hosts = [peer.host for peer in _peers if peer.can_host_store]
    return hosts[0] if hosts else os.environ.get("MASTER_ADDR", "-")


def name_of(ranks: Iterable[int]) -> str:
    """Return "rank 2" or "ranks 2, 3" or, on several machines, "ranks 2, 3 on node-1"."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        host = _peers[rank].host if are_on_several_machines() else ""
        by_host.setdefault(host, []).append(rank)
    names = []
    for host, numbers in by_host.items():
        name = f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
        names.append(f"{name} on {host}" if host else name)
    return " and ".join(names)


def _store_is_here() -> bool:
    """Return True if MASTER_ADDR is an address of this machine. This sends nothing."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), type=socket.SOCK_DGRAM
        ):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return probe.getsockname()[0] == address[0]
    except (OSError, KeyError, ValueError):
        pass
    return False
