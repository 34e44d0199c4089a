"""Let the machines of a launch meet, and exchange JSON objects.

Machine 0 listens on its main_process_port, the port that the launch itself will use. All machines
connect to it, including machine 0. So the meeting also tests that the address answers, and that the
port is free and not blocked by a firewall. It uses no PyTorch, because the machines may have
different versions of it.

Once all machines have joined, machine 0 stops listening, so that the launch can use the port. The
connections stay open: the machines can exchange the results of the launch, and a doctor that starts
in the meantime cannot join.

Each message is a JSON object in a line of its own. The machine that listens speaks first, so that
nothing is sent to a different program on the same port.
"""

import errno
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TextIO

from accel_demo.errors import UserError

GREETING = {"program": "accel-demo doctor", "protocol": 2}
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
    timeout: float


@contextmanager
def join_meeting(
    rank: int, point: MeetingPoint, clock: Callable[[], float] = time.time
) -> Iterator["Guest"]:
    """Connect to the meeting, and yield the connection. Machine 0 also hosts the meeting.

    Raises `UserError` if there is no meeting.
    """
    with ExitStack() as stack:
        is_host = False
        if rank == 0 and (listener := listener_on(point.port)):
            is_host = True
            stack.enter_context(MeetingHost(listener, point, clock))
        connection = stack.enter_context(connect(rank, point, is_host))
        lines = stack.enter_context(connection.makefile(encoding="utf-8"))
        yield Guest(connection, lines, clock)


def listener_on(port: int) -> socket.socket | None:
    """Return a socket that listens on the port, or None if the port is in use."""
    try:
        return socket.create_server(("", port), backlog=64)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise UserError(
            f"cannot use port {port}: {error.strerror}. "
            "Choose a main_process_port of 1024 or higher."
        ) from None


def connect(rank: int, point: MeetingPoint, is_host: bool) -> socket.socket:
    """Return a connection to the machine that listens. Raises `UserError` if there is none.

    Machine 0 does not wait for others: it listens itself, or the port is in use.
    """
    place = f"{point.address}:{point.port}"
    timeout = min(point.timeout, GREETING_TIMEOUT) if rank == 0 else point.timeout
    deadline, reason = time.monotonic() + timeout, "no answer"
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            connection = socket.create_connection(
                (point.address, point.port), max(0.1, min(GREETING_TIMEOUT, remaining))
            )
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
            raise UserError(
                f"{place} is used by a different program, or by a launch that is still running. "
                "Choose a main_process_port that is free, or start doctor again on all machines."
            ) from None
        except OSError as error:
            reason = (error.strerror or "no answer").lower()
        time.sleep(min(0.2, remaining))
    if is_host:
        raise UserError(
            f"--machine-rank is 0, but {place} does not reach this machine ({reason}). Set "
            "main_process_ip to an address of machine 0, or try several machines on this one with "
            "`accel-demo nodes`."
        )
    if rank == 0:
        raise UserError(
            f"port {point.port} is in use on this machine. Choose a main_process_port that is free."
        )
    raise UserError(
        f"no doctor answers at {place} within {point.timeout:g} s ({reason}). Start it on machine "
        "0, and check main_process_ip and the firewall."
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

    def __init__(self, connection: socket.socket, lines: TextIO, clock: Callable[[], float]):
        self.connection, self.lines, self.clock = connection, lines, clock

    def exchange(self, facts: dict, timeout: float) -> list[dict]:
        """Send this machine's facts, and return the facts of all machines, sorted by rank.

        All machines get the same list. Each object in it also has the keys "clock", the number of
        seconds by which the machine's clock is ahead of the host's, and "address". If a machine has
        not sent its facts after `timeout` seconds, or has left, the list does not contain them.
        """
        self.connection.settimeout(timeout + GREETING_TIMEOUT)
        try:
            facts = {**facts, "clock": self.offset_of_clock()}
            return self.ask({"facts": facts, "timeout": timeout})["all"]
        except TimeoutError:
            raise UserError(
                f"machine 0 has not answered within {timeout:g} s, perhaps because it waits for "
                "other machines. Start doctor on all machines, with the same --join-timeout."
            ) from None
        except (OSError, ValueError, LookupError):
            raise UserError(
                "machine 0 has ended the meeting. Start doctor again on all machines."
            ) from None

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
        send(self.connection, question)
        return json.loads(self.lines.readline())


class MeetingHost:
    """The host of the meeting, in a thread of its own. Use it in a `with` statement."""

    def __init__(self, listener: socket.socket, point: MeetingPoint, clock: Callable[[], float]):
        self.listener, self.machines, self.clock = listener, point.machines, clock
        self.is_listening, self.is_closing = True, False
        self.guests: dict[socket.socket, bytes] = {}  # what each has sent after its last line
        self.facts: dict[socket.socket, dict] = {}  # of the current exchange
        self.deadline = time.monotonic() + point.timeout  # of the current exchange
        self.thread = threading.Thread(target=self.serve, daemon=True)

    def __enter__(self) -> "MeetingHost":
        self.thread.start()
        return self

    def __exit__(self, kind, *error) -> None:
        """Free the port. Wait until the guests have left, unless Ctrl-C was pressed.

        A guest leaves when it has received its list. If the host closed a connection first, the
        system would keep the port in use for a while.
        """
        self.is_closing = True
        if kind is None or issubclass(kind, UserError):
            self.thread.join(GREETING_TIMEOUT)

    def serve(self) -> None:
        """Listen until the first exchange is over, and serve the guests until all have left."""
        while self.is_listening or self.guests:
            if self.is_closing:
                self.stop_listening()
            doors = [self.listener] if self.is_listening else []
            for connection in select.select([*self.guests, *doors], [], [], 0.05)[0]:
                is_new = connection is self.listener
                if is_new:
                    connection, _ = self.listener.accept()
                    self.guests[connection] = b""
                try:
                    if is_new:
                        send(connection, GREETING)
                    else:
                        self.answer(connection)
                except (OSError, ValueError, LookupError, TypeError):
                    self.remove(connection)
            if self.facts and (self.is_complete() or time.monotonic() > self.deadline):
                self.end_exchange()

    def stop_listening(self) -> None:
        self.is_listening = False
        self.listener.close()

    def answer(self, guest: socket.socket) -> None:
        """Read what a guest has sent. Send it the time, or keep its facts."""
        received = guest.recv(2**16)
        if not received:
            raise ConnectionError  # the guest has hung up
        *lines, self.guests[guest] = (self.guests[guest] + received).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "facts" not in message:
                send(guest, {"time": self.clock()})
                continue
            if not self.is_listening and not self.facts:  # the first facts of a later exchange
                self.deadline = time.monotonic() + message["timeout"]
            self.facts[guest] = {**message["facts"], "address": guest.getpeername()[0]}

    def is_complete(self) -> bool:
        """Return True if there is nothing to wait for.

        If the machines disagree about their number, the smallest one is used, so that nobody waits.
        """
        if self.is_listening:
            numbers = [facts["machines"] for facts in self.facts.values()]
            return len(self.facts) >= min(self.machines, *numbers)
        return self.facts.keys() == self.guests.keys()

    def end_exchange(self) -> None:
        """Send all facts to each guest that has sent its own. The others are late: hang up."""
        everyone = sorted(self.facts.values(), key=lambda one: (one["rank"], one["address"]))
        senders, self.facts = set(self.facts), {}
        self.stop_listening()
        for guest in list(self.guests):
            try:
                if guest not in senders:
                    raise ConnectionError
                send(guest, {"all": everyone})
            except OSError:
                self.remove(guest)

    def remove(self, guest: socket.socket) -> None:
        """Forget a guest that has hung up: its doctor may be started again."""
        self.guests.pop(guest, None)
        self.facts.pop(guest, None)
        guest.close()


def send(connection: socket.socket, message: dict) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")
