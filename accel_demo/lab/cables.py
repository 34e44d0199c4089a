"""The cables that connect nodes: virtual ones, or none if the nodes share this machine's loopback.

A network namespace has its own network interfaces, addresses and ports. Processes in two namespaces
can only reach each other through a virtual cable, as if they ran on two machines. Each node has its
own namespace, with an interface eth0 at one end of a cable. The other ends are plugged into a
switch, a bridge in a separate namespace.

A *machine* is a real computer. A *node* (nodes/) takes the place of a machine in a launch: it has
its own launcher and, with a cable, its own host name. A *host* (hosts.py) takes the place of a
machine for a single process, and separates only its network. In this module only, *node* stands for
either.

Source: https://man7.org/linux/man-pages/man7/network_namespaces.7.html
"""

import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE

from accel_demo.errors import UserError
from accel_demo.processes.environment import LOOPBACK
from accel_demo.processes.launch import run_to_end, start

TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv", "mount")
UNSHARE = "unshare --net --uts --mount --pid --fork --kill-child --mount-proc".split()
# Give the node its host name ($1) and its hosts file ($2), and start what follows.
# The host name and the mount exist only in the node's namespaces.
PREPARE = 'echo "$1" > /proc/sys/kernel/hostname && mount --bind "$2" /etc/hosts && shift 2 && '
# Without an IPv6 address, the kernel itself sends nothing, so the commands have sent all bytes.
NO_IPV6_ADDRESS = "/proc/sys/net/ipv6/conf/default/addr_gen_mode"
PREPARE += f"if [ -e {NO_IPV6_ADDRESS} ]; then echo 1 > {NO_IPV6_ADDRESS}; fi && "
PREPARE += 'exec "$@"'
COMMAND_TIMEOUT = 30  # seconds that `ip` or `tc` may take
QUEUE = "400kb"  # how many bytes may wait; small compared with a gradient
# How many bytes may pass at once: two packets, or more at a rate so high that a timer is too slow
LEAST_BURST, MOST_BURST, BURST_TIME = 3000, 32_000, 1  # bytes, bytes, milliseconds
MOST_DELAYED_PACKETS = 100_000  # the default of netem, 1000, would drop packets at high rates
# For each queueing discipline of `tc`: the flag that needs it, and what it does.
QDISCS = {"tbf": ("--rate", "limit the rate"), "netem": ("--delay", "delay packets")}
RATE_UNITS = {"kbit": 1, "mbit": 1000, "gbit": 1_000_000}  # in kbit/s
DELAY_UNITS = {"us": 1, "ms": 1000, "s": 1_000_000}  # in microseconds
# For each flag: its units, the least and the greatest value in the first unit, and what to write
LIMITS = {
    "--rate": (RATE_UNITS, 100, 100_000_000, "like 100mbit, from 100kbit to 100gbit"),
    "--delay": (DELAY_UNITS, 100, 1_000_000, "like 5ms, from 100us to 1s"),
}


class Unavailable(Exception):
    """Virtual cables cannot be made here. The message says why."""


class Loopback:
    """All nodes use this machine's loopback interface, and have the same host name."""

    interface = LOOPBACK

    def address(self, node: int) -> str:
        return "127.0.0.1"

    def wrapped(self, node: int, hosts_file: str, command: list[str]) -> list[str]:
        """Return the command that starts `command` on a node."""
        return command

    def connect(self, node: int, pid: int) -> None:
        """Connect a node to the others. `pid` is the process that `wrapped` has started."""


@dataclass(frozen=True)
class Cables:
    """Each node has its own network namespace, and a cable to the switch.

    `rate` limits what each node can send, such as "100mbit". `delay` is how long a packet takes
    from one node to another, such as "5ms". None means no limit and no delay.
    """

    nodes: int
    rate: str | None
    delay: str | None
    switch: int  # the process ID of its keeper
    interface = "eth0"

    def address(self, node: int) -> str:
        return f"10.77.0.{node + 1}"

    def wrapped(self, node: int, hosts_file: str, command: list[str]) -> list[str]:
        return [*UNSHARE, "sh", "-c", PREPARE, "sh", f"node-{node}", hosts_file, *command]

    def connect(self, node: int, pid: int) -> None:
        """Plug a cable into the node and the switch, and configure the node's end."""
        port, end = f"port{node}", self.interface
        self.run_in_switch(f"ip link add {port} type veth peer name {end} netns {pid}")
        self.run_in_switch(f"ip link set {port} master bridge up")
        run_in_namespace(pid, "ip link set lo up")
        run_in_namespace(pid, f"ip address add {self.address(node)}/24 dev {end}")
        run_in_namespace(pid, f"ip link set {end} up")
        if self.rate:
            shape = f"tbf rate {self.rate} burst {burst(self.rate)} limit {QUEUE}"
            run_in_namespace(pid, f"tc qdisc add dev {end} root {shape}")
        if self.delay:  # at the switch's end, where it delays what the node receives
            slow = f"tc qdisc add dev {port} root netem delay {self.delay}"
            self.run_in_switch(f"{slow} limit {MOST_DELAYED_PACKETS}")

    def set_cable(self, node: int, is_plugged_in: bool) -> None:
        """Pull the node's cable out of the switch, or plug it in again.

        The node's own interface keeps its address, as on a real machine.
        """
        self.run_in_switch(f"ip link set port{node} {'up' if is_plugged_in else 'down'}")

    def run_in_switch(self, command: str) -> None:
        run_in_namespace(self.switch, command)


@contextmanager
def open_cables(nodes: int, rate: str | None, delay: str | None = None) -> Iterator[Cables]:
    """Start the switch. Raises `Unavailable` if this machine cannot run it.

    When the `with` statement ends, or if this process dies, the kernel removes everything.
    """
    if reason := why_not():
        raise Unavailable(reason)
    problem = "this machine does not allow network namespaces"
    # The switch has the same namespaces as a node, to find out if they are allowed.
    with kept_namespaces(UNSHARE, problem) as switch:
        network = Cables(nodes, rate, delay, switch)
        try:
            network.run_in_switch("ip link add bridge type bridge")
            network.run_in_switch("ip link set bridge up")
        except UserError as error:
            raise Unavailable(str(error)) from None
        yield network


@contextmanager
def kept_namespaces(unshare: Sequence[str], problem: str, prepare: str = "true") -> Iterator[int]:
    """Create namespaces, and yield the ID of a process that keeps them.

    `unshare` is the command that creates them, and `prepare` is a shell command to run in them.
    Raises `Unavailable`, with `problem` and the reason, if one of them fails.
    """
    # `cat` exits, and the kernel removes the namespaces, when the pipe to its stdin is closed.
    keeper = start(
        [*unshare, "sh", "-c", f"{prepare} && echo ready && exec cat"],
        dict(os.environ),
        PIPE,
        PIPE,
        stdin=PIPE,
        cwd=Path.cwd(),
        new_session=True,  # so that Ctrl-C only reaches the command and its processes
    )
    assert keeper.stdout and keeper.stderr
    try:
        if keeper.stdout.readline() != "ready\n":
            reason = " ".join(keeper.stderr.read().split()) or "unshare failed"
            raise Unavailable(f"{problem} ({reason})")
        yield keeper.pid
    finally:
        keeper.communicate()  # close stdin


@contextmanager
def hosts_file(network: Loopback | Cables) -> Iterator[str]:
    """Yield the path of a temporary file with the names of all nodes, to mount at /etc/hosts.

    PyTorch looks up the names of addresses, but a node cannot reach a name server. A mount keeps
    the file's content after the `with` statement.
    """
    lines = ["127.0.0.1 localhost", "::ffff:127.0.0.1 localhost.ipv6"]
    for node in range(network.nodes if isinstance(network, Cables) else 0):
        # PyTorch looks up the names of IPv6 addresses, too, and warns if there is none.
        lines += [f"{network.address(node)} node-{node}"]
        lines += [f"::ffff:{network.address(node)} node-{node}.ipv6"]
    with ExitStack() as stack:
        try:
            file = stack.enter_context(tempfile.NamedTemporaryFile("w", encoding="utf-8"))
            file.write("\n".join([*lines, ""]))
            file.flush()
            os.chmod(file.name, 0o644)
        except OSError as error:
            reason = f"cannot write a temporary file ({error.strerror})"
            raise UserError(f"{reason}. Set TMPDIR.") from None
        yield file.name


def why_not() -> str | None:
    """Return why this machine cannot make network namespaces, or None if it seems able to."""
    if sys.platform != "linux":
        return "network namespaces exist only on Linux"
    if os.geteuid() != 0:
        return "network namespaces need root (sudo)"
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing:
        package = "iproute2" if missing[0] in ("ip", "tc") else "util-linux"
        return f"the program {missing[0]} is missing (on Debian: apt-get install {package})"
    return None


def run_in_namespace(pid: int, command: str) -> None:
    """Run a command in the network namespace of the process `pid`.

    Raises `UserError` if the command fails, for example because the kernel lacks a module.
    """
    words = ["nsenter", f"--net=/proc/{pid}/ns/net", *command.split()]
    ended = run_to_end(words, COMMAND_TIMEOUT, environment=dict(os.environ))
    if ended.returncode is None:
        raise UserError(f"`{command}` did not finish within {COMMAND_TIMEOUT} s. Try again later.")
    if ended.returncode == 0:
        return
    reason = (ended.stderr.strip().splitlines() or ["no reason given"])[0]
    for qdisc, (flag, purpose) in QDISCS.items():
        if qdisc in words:
            raise UserError(
                f"{flag}: this kernel cannot {purpose}, because `tc … {qdisc}` failed ({reason}). "
                f"Leave {flag} out, or use a kernel with the module sch_{qdisc}."
            )
    raise UserError(
        f"`{command}` failed ({reason}). This machine cannot connect network namespaces."
    )


def check(flag: str, value: str | None) -> None:
    """Raise `UserError` unless `value` is None, or a number with a unit of `tc` that is in range.

    `flag` is a key of `LIMITS`.
    """
    units, least, most, example = LIMITS[flag]
    if value is not None and not least <= in_first_unit(value, units) <= most:
        raise UserError(f"{flag} must be {example}, got {value}")


def burst(rate: str) -> int:
    """Return how many bytes may pass at once at a rate such as "100mbit".

    They have to be few: what a program sends between two pauses passes without a limit if it is
    smaller.
    """
    bits = in_first_unit(rate, RATE_UNITS) * BURST_TIME
    return min(max(LEAST_BURST, int(bits / 8)), MOST_BURST)


def in_first_unit(text: str, units: dict[str, int]) -> float:
    """Convert a number with a unit, such as "5ms", to the first unit. Return NaN if it is wrong."""
    match = re.fullmatch(rf"([0-9]+(?:\.[0-9]+)?)({'|'.join(units)})", text)
    return float(match[1]) * units[match[2]] if match else math.nan
