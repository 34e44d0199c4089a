"""Let the machines of a launch meet, and exchange one JSON object each.

Machine 0 listens on its main_process_port, the port that the launch itself will use. The others
connect to it. So the meeting also tests that the address answers, and that the port is free and not
blocked by a firewall. It uses no PyTorch, because the machines may have different versions of it.

Each message is a JSON object in a line of its own. The machine that listens speaks first, so that
nothing is sent to a different program on the same port.
"""

import errno
import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from accel_demo.errors import UserError

GREETING = {"program": "accel-demo doctor", "protocol": 1}
GREETING_TIMEOUT = 5  # seconds in which a doctor must greet
CLOCK_READINGS = 5


class DifferentProgram(Exception):
    """A program that is not a doctor uses the port."""


@dataclass(frozen=True)
class MeetingPoint:
    """Where the machines meet, and how many seconds they wait for each other."""

    address: str
    port: int
    machines: int
    patience: float
    is_second: bool = False  # True if the machines meet again, after the launch


def exchange(
    facts: dict, rank: int, point: MeetingPoint, clock: Callable[[], float] = time.time
) -> list[dict]:
    """Return the facts of all machines that came to the meeting. All machines get the same list.

    Each object in the list also has the keys "clock", the number of seconds by which the machine's
    clock is ahead of the listening machine's, and "address". If some machines do not come, the list
    is shorter. Raises `UserError` if there is no meeting.
    """
    deadline = time.monotonic() + point.patience
    with ExitStack() as stack:
        if rank == 0:
            listener = listener_on(point, deadline)
            if listener:
                stack.enter_context(Host(listener, point, deadline, clock))
        connection = stack.enter_context(connect(point, deadline))
        return Guest(connection, clock).tell(facts, point.patience)


def listener_on(point: MeetingPoint, deadline: float) -> socket.socket | None:
    """Return a socket that listens on the port, or None if the port is in use."""
    while True:
        try:
            return socket.create_server(("", point.port), backlog=64)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise UserError(f"cannot use port {point.port}: {error.strerror}") from None
        if not point.is_second or time.monotonic() > deadline:
            return None
        time.sleep(0.1)  # the launch is still using the port


def connect(point: MeetingPoint, deadline: float) -> socket.socket:
    """Return a connection to the machine that listens. Raises `UserError` if there is none."""
    reason = "no answer"
    while time.monotonic() < deadline:
        patience = max(0.1, min(GREETING_TIMEOUT, deadline - time.monotonic()))
        try:
            connection = socket.create_connection((point.address, point.port), patience)
            try:
                check_greeting(connection)
                return connection
            except BaseException:
                connection.close()
                raise
        except (socket.gaierror, UnicodeError):
            raise UserError(
                f"main_process_ip {point.address} is not a known address. Use that of machine 0."
            ) from None
        except DifferentProgram:
            if not point.is_second:
                raise UserError(
                    f"port {point.port} of {point.address} is used by a different program. Choose "
                    "a main_process_port that is free."
                ) from None
        except OSError as error:
            reason = (error.strerror or "no answer").lower()
        time.sleep(0.2)
    raise UserError(
        f"no doctor answers at {point.address}:{point.port} within {point.patience:g} s "
        f"({reason}). Start it on machine 0, and check main_process_ip and the firewall."
    )


def check_greeting(connection: socket.socket) -> None:
    """Raise `DifferentProgram` unless a doctor greets, and `OSError` if it hangs up."""
    line = b""
    try:
        while not line.endswith(b"\n") and len(line) < 200:
            byte = connection.recv(1)
            if not byte:
                raise ConnectionResetError(errno.ECONNRESET, "connection closed")
            line += byte
        if json.loads(line) != GREETING:
            raise DifferentProgram
    except (TimeoutError, ValueError):
        raise DifferentProgram from None


class Guest:
    """A machine's side of its connection to the host."""

    def __init__(self, connection: socket.socket, clock: Callable[[], float]):
        self.connection, self.clock = connection, clock
        self.lines = connection.makefile("rw", encoding="utf-8")

    def tell(self, facts: dict, patience: float) -> list[dict]:
        """Send the facts, and return the facts of all machines."""
        try:
            facts = {**facts, "clock": self.offset_of_clock()}
            self.connection.settimeout(patience + GREETING_TIMEOUT)
            return self.ask({"facts": facts})["all"]
        except (OSError, ValueError, LookupError):
            raise UserError("machine 0 has ended the meeting. Start doctor again.") from None

    def offset_of_clock(self) -> float:
        """Return by how many seconds this clock is ahead of the host's.

        The answer took some time. We assume that it was sent in the middle, and use the fastest.
        """
        readings = []
        for _ in range(CLOCK_READINGS):
            sent, start = self.clock(), time.perf_counter()
            time_of_host = self.ask({"what time is it": True})["time"]
            duration = time.perf_counter() - start
            readings.append((duration, sent + duration / 2 - time_of_host))
        return min(readings)[1]

    def ask(self, question: dict) -> dict:
        write(self.lines, question)
        return json.loads(self.lines.readline())


class Host:
    """The machine that listens, in threads of its own. Use it in a `with` statement."""

    def __init__(
        self,
        listener: socket.socket,
        point: MeetingPoint,
        deadline: float,
        clock: Callable[[], float],
    ):
        self.listener, self.point, self.deadline, self.clock = listener, point, deadline, clock
        self.joined: list[dict] = []
        self.expected = point.machines
        self.changed = threading.Condition()
        self.guests: list[threading.Thread] = []

    def __enter__(self) -> "Host":
        threading.Thread(target=self.accept, daemon=True).start()
        return self

    def __exit__(self, kind, *error) -> None:
        """Free the port, and wait until the guests have received the list, unless there is none."""
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self.listener.close()
        for guest in self.guests if kind is None else []:
            guest.join(timeout=GREETING_TIMEOUT)

    def accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, (address, *_) = self.listener.accept()
                guest = threading.Thread(target=self.serve, args=[connection, address], daemon=True)
                self.guests.append(guest)
                guest.start()

    def serve(self, connection: socket.socket, address: str) -> None:
        """Answer one guest until it has told its facts, then send the facts of all machines."""
        connection.settimeout(self.point.patience + GREETING_TIMEOUT)
        with connection, suppress(OSError, ValueError, LookupError, TypeError):
            lines = connection.makefile("rw", encoding="utf-8")
            write(lines, GREETING)
            while "facts" not in (message := json.loads(lines.readline())):
                write(lines, {"time": self.clock()})
            facts = {**message["facts"], "address": address}
            write(lines, {"all": self.wait_for_all(facts)})
            connection.settimeout(GREETING_TIMEOUT)
            lines.readline()  # until the guest hangs up: then its side keeps the closed connection

    def wait_for_all(self, facts: dict) -> list[dict]:
        """Return the facts of all machines, or of those that have come until the deadline.

        If the machines disagree about their number, the smallest one is used, so that nobody waits.
        """
        with self.changed:
            self.joined.append(facts)
            self.expected = min(self.expected, facts.get("machines", self.expected))
            self.changed.notify_all()
            remaining = self.deadline - time.monotonic()
            self.changed.wait_for(lambda: len(self.joined) >= self.expected, max(0, remaining))
            return sorted(self.joined, key=lambda one: (one["rank"], one["address"]))


def write(lines: Any, message: dict) -> None:
    lines.write(json.dumps(message) + "\n")
    lines.flush()
