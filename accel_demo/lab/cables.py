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
from subprocess import PIPE

from accel_demo.errors import UserError
from accel_demo.processes.environment import LOOPBACK
from accel_demo.processes.launch import run_to_end, start

TOOLS = ("ip", "tc", "unshare", "nsenter", "mount")
UNSHARE = [
    "unshare",
    "--net",
    "--uts",
    "--mount",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
]
COMMAND_TIMEOUT = 30  # seconds that `ip` or `tc` may take
# How many bytes may pass at once, and how many may wait. Both are small compared with a gradient.
BURST, QUEUE = "32kb", "400kb"
MOST_DELAYED_PACKETS = 100_000  # the default of netem, 1000, would drop packets at high rates
# For each queueing discipline of `tc`: the flag that needs it, and what it does.
QDISCS = {"tbf": ("--rate", "limit the rate"), "netem": ("--delay", "delay packets")}
RATE_UNITS = {"kbit": 1, "mbit": 1000, "gbit": 1_000_000}  # in kbit/s
DELAY_UNITS = {"us": 1, "ms": 1000, "s": 1_000_000}  # in microseconds


class Unavailable(Exception):
    """Virtual cables cannot be made here. The message says why."""


class Loopback:
    """All nodes use this machine's loopback interface, and have the same host name."""

    interface = LOOPBACK

    def __init__(self, nodes: int):
        self.nodes = nodes

    def __enter__(self) -> "Loopback":
        return self

    def __exit__(self, *error) -> None:
        pass

    def address(self, node: int) -> str:
        return "127.0.0.1"

    def identity(self, node: int) -> dict[str, str]:
        """Return the node's own `host_name` and `hosts_file`, if it has any."""
        return {}

    def wrapped(self, command: list[str]) -> list[str]:
        """Return the command that starts `command` on a node."""
        return command

    def connect(self, node: int, pid: int) -> None:
        """Connect a node to the others. `pid` is the process that `wrapped` has started."""


class Cables:
    """Each node has its own network namespace and a cable. Use it in a `with` statement.

    When the `with` statement ends, or if this process dies, the kernel removes everything.
    """

    interface = "eth0"

    def __init__(self, nodes: int, rate: str | None = None, delay: str | None = None):
        """`rate` limits what each node can send, such as "100mbit". None means no limit.

        `delay` is how long a packet takes from one node to another, such as "5ms".
        """
        self.nodes, self.rate, self.delay = nodes, rate, delay

    def __enter__(self) -> "Cables":
        """Start the switch. Raises `Unavailable` if this machine cannot run it."""
        if reason := why_not():
            raise Unavailable(reason)
        # `cat` exits, and the kernel removes the namespace, when the pipe to its stdin is closed.
        keeper = ["sh", "-c", "echo ready; exec cat"]
        self.switch = start(
            [*UNSHARE, *keeper],  # the same namespaces as a node, to find out if they are allowed
            dict(os.environ),
            PIPE,
            PIPE,
            stdin=PIPE,
            new_session=True,
        )
        assert self.switch.stdout and self.switch.stderr
        try:
            if self.switch.stdout.readline() != "ready\n":
                reason = " ".join(self.switch.stderr.read().split()) or "unshare failed"
                raise Unavailable(f"this machine does not allow network namespaces ({reason})")
            self.run_in_switch("ip", "link", "add", "bridge", "type", "bridge")
            self.run_in_switch("ip", "link", "set", "bridge", "up")
        except BaseException as error:
            self.__exit__()
            if isinstance(error, UserError):
                raise Unavailable(str(error)) from None
            raise
        return self

    def __exit__(self, *error) -> None:
        self.switch.communicate()  # close stdin, so that `cat` exits

    def address(self, node: int) -> str:
        return f"10.77.0.{node + 1}"

    def identity(self, node: int) -> dict[str, str]:
        """Return the node's `host_name`, and the content of its /etc/hosts as `hosts_file`."""
        lines = ["127.0.0.1 localhost", "::ffff:127.0.0.1 localhost.ipv6"]
        for other in range(self.nodes):
            # PyTorch looks up the names of IPv6 addresses, too, and warns if there is none.
            lines += [f"{self.address(other)} node-{other}"]
            lines += [f"::ffff:{self.address(other)} node-{other}.ipv6"]
        hosts_file = "\n".join([*lines, ""])
        return {"host_name": f"node-{node}", "hosts_file": hosts_file}

    def wrapped(self, command: list[str]) -> list[str]:
        return [*UNSHARE, *command]

    def connect(self, node: int, pid: int) -> None:
        """Plug a cable into the node and the switch, and configure the node's end."""
        port = f"port{node}"
        self.run_in_switch(
            *f"ip link add {port} type veth peer name {self.interface} netns {pid}".split()
        )
        self.run_in_switch("ip", "link", "set", port, "master", "bridge", "up")
        for line in (
            "ip link set lo up",
            f"ip address add {self.address(node)}/24 dev {self.interface}",
            f"ip link set {self.interface} up",
        ):
            run_in_namespace(pid, *line.split())
        if self.rate:
            shape = f"tc qdisc add dev {self.interface} root tbf rate {self.rate}"
            run_in_namespace(pid, *f"{shape} burst {BURST} limit {QUEUE}".split())
        if self.delay:  # at the switch's end, where it delays what the node receives
            slow = f"tc qdisc add dev {port} root netem delay {self.delay}"
            self.run_in_switch(*f"{slow} limit {MOST_DELAYED_PACKETS}".split())

    def set_cable(self, node: int, is_plugged_in: bool) -> None:
        """Pull the node's cable out of the switch, or plug it in again.

        The node's own interface keeps its address, as on a real machine.
        """
        self.run_in_switch("ip", "link", "set", f"port{node}", "up" if is_plugged_in else "down")

    def run_in_switch(self, *command: str) -> None:
        run_in_namespace(self.switch.pid, *command)


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


def run_in_namespace(pid: int, *command: str) -> None:
    """Run a command in the network namespace of the process `pid`.

    Raises `UserError` if the command fails, for example because the kernel lacks a module.
    """
    entered = ["nsenter", f"--net=/proc/{pid}/ns/net", *command]
    ended = run_to_end(entered, COMMAND_TIMEOUT, environment=dict(os.environ))
    if ended.returncode is None:
        raise UserError(
            f"`{' '.join(command)}` did not finish within {COMMAND_TIMEOUT} s. Try again later."
        )
    if ended.returncode == 0:
        return
    reason = (ended.stderr.strip().splitlines() or ["no reason given"])[0]
    for qdisc, (flag, purpose) in QDISCS.items():
        if qdisc in command:
            raise UserError(
                f"{flag}: this kernel cannot {purpose}, because `tc … {qdisc}` failed ({reason}). "
                f"Leave {flag} out, or use a kernel with the module sch_{qdisc}."
            )
    raise UserError(
        f"`{' '.join(command)}` failed ({reason}). This machine cannot connect network namespaces."
    )


def replace_hosts_file(content: str) -> None:
    """Replace /etc/hosts for all processes in this mount namespace, or print an error and exit.

    PyTorch looks up the names of addresses, but a node cannot reach a name server.
    """
    try:
        with tempfile.NamedTemporaryFile("w") as file:  # the mount keeps its content
            file.write(content)
            file.flush()
            os.chmod(file.name, 0o644)
            command = ["mount", "--bind", file.name, "/etc/hosts"]
            returncode = start(command, dict(os.environ), None, None).wait()
    except OSError as error:
        sys.exit(f"error: cannot write a temporary file ({error.strerror}). Set TMPDIR.")
    if returncode != 0:
        sys.exit(1)  # mount has printed the reason


def check_rate(rate: str) -> None:
    """Raise `UserError` unless `rate` is a number with a unit of `tc`, such as "100mbit"."""
    if not 100 <= in_first_unit(rate, RATE_UNITS) <= 100_000_000:
        raise UserError(f"--rate must be like 100mbit, from 100kbit to 100gbit, got {rate}")


def check_delay(delay: str) -> None:
    """Raise `UserError` unless `delay` is a number with a unit of `tc`, such as "5ms"."""
    if not 100 <= in_first_unit(delay, DELAY_UNITS) <= 1_000_000:
        raise UserError(f"--delay must be like 5ms, from 100us to 1s, got {delay}")


def in_first_unit(text: str, units: dict[str, int]) -> float:
    """Convert a number with a unit, such as "5ms", to the first unit. Return NaN if it is wrong."""
    match = re.fullmatch(rf"([0-9]+(?:\.[0-9]+)?)({'|'.join(units)})", text)
    return float(match[1]) * units[match[2]] if match else math.nan
