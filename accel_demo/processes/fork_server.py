"""Start Python programs quickly, by forking them from a server that has already imported torch.

`python program.py` spends 2 to 3 seconds importing torch before the program does anything. The
server imports torch and the other libraries once. It starts no threads and runs no computation, so
every forked program starts in the same clean state: with the requested environment, arguments and
working directory, default signal handlers, and newly seeded random number generators. If the
program is a launcher, its workers are forked as well (see forked_python.py).

A forked program differs from a program that is started normally:
- Environment variables that Python or a library reads at startup would have no effect. If a request
  changes such a variable, the server refuses the request, and the program is started normally.
- A program that forgets an import may still work, because the server has imported the library.
- Warnings raised while a library is imported are printed to the server's stderr.
- SIGUSR2 prints the program's Python stack to stderr instead of killing the program.
- String hashes are equal in all programs, so sets have the same order on all ranks.
- At exit, a program runs its exit handlers and flushes its output, but does not finalize the
  interpreter, because finalization would copy memory for 2 seconds.

POSIX only.
"""

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from accel_demo.processes import forked_python
from accel_demo.processes.forked_python import (
    REFUSED,
    ask,
    can_be_forked,
    ignored_signals,
    limits,
    receive_number,
)

ADDRESS = "ACCEL_DEMO_FORK_SERVER"  # environment variable with the path of the server's socket
SERVER = [sys.executable, "-m", "accel_demo.processes.fork_server_main"]


class ForkServer:
    """A running fork server. By default, it has the same environment as this process.

    When this process exits, the server removes its temporary folder and exits.
    """

    def __init__(self, environment: dict[str, str] | None = None):
        self._folder = tempfile.mkdtemp(prefix="fork-")
        self.address = str(Path(self._folder, "socket"))
        self.python = _write_python(Path(self._folder, "python"), self.address)
        read, self._lifeline = os.pipe()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(64)
            self._process = subprocess.Popen(
                [*SERVER, str(listener.fileno()), str(read), self.python],
                env=environment,
                pass_fds=[listener.fileno(), read],
                stdin=subprocess.DEVNULL,
            )
        os.close(read)

    def close(self) -> None:
        """Stop the server, and kill the programs that it has started."""
        os.close(self._lifeline)
        self._process.wait()


class ForkedProcess:
    """A program started by the server, with some of the methods of `subprocess.Popen`."""

    def __init__(self, arguments: list[str], connection: socket.socket, pid: int):
        self.args, self.pid, self.returncode = arguments, pid, None
        self._connection = connection

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._connection.settimeout(None if timeout is None else max(timeout, 0))
            try:
                self.returncode = receive_number(self._connection)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # the process has just exited
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork(
    command: list[str],
    environment: dict[str, str],
    cwd: str | Path,
    stdout,
    stderr,
    new_session: bool = False,
    ignored_signal: int | None = None,
) -> ForkedProcess | None:
    """Fork a Python program from the server whose address is `environment[ADDRESS]`.

    Returns None if the address is not set, if the server refuses, or if the command is not a Python
    program. The parameters have the same meaning as in `launch.start`.
    """
    address, arguments = environment.get(ADDRESS), _for_python(*command)
    if not address or not arguments:
        return None
    request = {
        "arguments": arguments,
        "environment": environment,
        "folder": str(cwd),
        "new_session": new_session,
        "ignored": [*ignored_signals(), *([] if ignored_signal is None else [ignored_signal])],
        "limits": limits(),
    }
    connection, process = ask(address, request, {1: stdout.fileno(), 2: stderr.fileno()})
    if process == REFUSED:
        connection.close()
        return None
    return ForkedProcess(command, connection, process)


def _write_python(path: Path, address: str) -> str:
    """Write a script that works like `python`, but runs each program in a fork of the server."""
    words = [sys.executable, "-IS", forked_python.__file__, sys.executable, address]
    path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    path.chmod(0o700)
    return str(path)


def _for_python(program: str, *arguments: str) -> list[str] | None:
    """Return the arguments that make `python` run this command, or None if it cannot be forked."""
    ours = Path(sys.executable).parent
    if Path(program).parent != ours:
        return None
    if Path(program).name in ("python", "python3", Path(sys.executable).name):
        return list(arguments) if can_be_forked(list(arguments)) else None
    with open(program, "rb") as file:
        return [program, *arguments] if file.read(2) == b"#!" else None
