"""Check that the processes on different machines could connect to each other.

All of them connect to the main process port first. But then, each process listens on a port that
the system chooses, and writes down its address for the others.
"""

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

CONNECT_TIMEOUT = 5  # seconds


def problem_of_host_name(main_process_ip: str) -> list[str] | None:
    """Return why gloo cannot write down a useful address of this machine, or None if it can.

    Debian writes 127.0.1.1 into /etc/hosts, which is a different machine for each. The reason is a
    list: the host name, what is wrong with it, and the name of the interface to use instead.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ or not is_loopback(address := gloo_address()):
        return None
    host = socket.gethostname()
    addresses = addresses_of(host)
    reason = "does not resolve to an address"
    if address in addresses:
        reason = f"resolves to {address}, which others cannot reach"
    elif addresses:
        reason = f"resolves to {addresses[0]}, which is not an address of this machine"
    return [host, reason, interface_towards(main_process_ip)]


def problem_of_interfaces() -> str | None:
    """Return which name in GLOO_SOCKET_IFNAME is wrong, or None if all are right."""
    names, known = os.environ.get("GLOO_SOCKET_IFNAME", "").split(","), psutil.net_if_addrs()
    for name in names:
        if name and name not in known:
            return (
                f"GLOO_SOCKET_IFNAME is {name}, but this machine has no such network interface. "
                f"It has {', '.join(known)}."
            )
    return None


def gloo_address() -> str:
    """Return the address that a process on this machine writes down if it uses gloo.

    Without GLOO_SOCKET_IFNAME, this is the first address of the host name that belongs to this
    machine, or else the loopback address. Source: createDefaultDevice in
    https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/ProcessGroupGloo.cpp
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        known = psutil.net_if_addrs().get(interface, [])
        addresses = [one.address for one in known if one.family == socket.AF_INET]
    else:
        addresses = [one for one in addresses_of(socket.gethostname()) if is_own(one)]
    return addresses[0] if addresses else "127.0.0.1"


def addresses_of(name: str) -> list[str]:
    """Return the addresses that a name or an address resolves to, or an empty list."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(address[0]) for *_, address in found]


def is_own(address: str) -> bool:
    """Return True if the address belongs to this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return True
    return False


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def interface_towards(address: str) -> str:
    """Return the network interface that reaches an address, or "eth0" if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing
        except (OSError, UnicodeError):
            return "eth0"
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == own for one in addresses) and not is_loopback(own):
            return name
    return "eth0"


@contextmanager
def open_port() -> Iterator[int]:
    """Listen on a port that the system chooses, and yield the port.

    The system also answers: a connection needs no `accept` to succeed.
    """
    with socket.create_server(("", 0), backlog=64) as listener:
        yield listener.getsockname()[1]


def unreachable_among(targets: dict[int, tuple[str, int]]) -> list | None:
    """Return the first target that this machine cannot connect to, or None if there is none.

    `targets` are addresses and ports, by the rank of their machine. The result is the rank, the
    address, the port and the reason.
    """
    for rank, (address, port) in targets.items():
        try:
            socket.create_connection((address, port), CONNECT_TIMEOUT).close()
        except OSError as error:
            return [rank, address, port, (error.strerror or "no answer").lower()]
    return None
