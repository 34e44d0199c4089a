"""Run Python programs in processes forked by the fork server (see fork_server.py).

This file is used in two ways:
- `launch.start` calls `start`, because ACCEL_DEMO_STARTER is the path of this file.
- It is run like `python` itself. For each worker, torchrun and Accelerate's launchers start the
  program in PYTHON_EXEC, and multiprocessing starts the program passed to `set_executable`. The
  fork server sets both to a program that runs this file. This file requests a forked process with
  the arguments, environment, working directory, open files and ignored signals of the current
  process. It forwards signals to the forked process, and exits with the same status. If the server
  refuses the request, the current process runs `python` itself.

This file imports little, so it starts much faster than a program that imports torch.
"""

import json
import os
import select
import signal
import socket
import struct
import sys
from contextlib import suppress

if sys.platform != "win32":  # Windows has neither this module nor fork
    import resource

ADDRESS = "ACCEL_DEMO_FORK_SERVER"  # environment variable with the path of the server's socket
NUMBER = struct.Struct("!i")
REFUSED = -1
SIGNALS = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCONT")
MOST_FILES = 250  # maximum number of files in one message; Linux allows 253


def start(
    command: list[str],
    environment: dict[str, str],
    stdout,
    stderr,
    *,
    stdin,
    cwd,
    new_session: bool,
    ignored_signal: int | None,
) -> "ForkedProcess | None":
    """Fork a Python program. The parameters have the same meaning as in `launch.start`.

    Returns None if the server refuses, or if the command is not a Python program. Also returns None
    if `stdin` is given or an output is a pipe, because a program that is controlled through pipes
    runs for longer than it takes to import torch.
    """
    import subprocess  # slow to import, and only needed here, where it is already imported

    arguments = _arguments_for_python(*command)
    if not arguments or stdin != subprocess.DEVNULL:
        return None
    if not all(hasattr(file, "fileno") for file in (stdout, stderr)):
        return None
    request = {
        "arguments": arguments,
        "environment": environment,
        "folder": str(cwd or os.getcwd()),
        "new_session": new_session,
        "ignored": [*ignored_signals(), *([] if ignored_signal is None else [ignored_signal])],
        "limits": limits(),
        # The keeper of an audit kills its descendants, but this process will not be one of them.
        "ends_with_client": "ACCEL_DEMO_AUDIT" in environment,
    }
    files = {1: stdout.fileno(), 2: stderr.fileno()}
    connection, process = ask(environment[ADDRESS], request, files)
    if process == REFUSED:
        connection.close()
        return None
    return ForkedProcess(command, connection, process)


class ForkedProcess:
    """A program started by the server, with some of the methods of `subprocess.Popen`."""

    def __init__(self, arguments: list[str], connection: socket.socket, pid: int):
        self.args, self.pid, self.returncode = arguments, pid, None
        self._connection = connection

    def wait(self, timeout: float | None = None) -> int:
        import subprocess

        if self.returncode is None:
            self._connection.settimeout(None if timeout is None else max(timeout, 0))
            try:
                self.returncode = receive_number(self._connection)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        import subprocess

        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # the process has just exited
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def main(python: str, address: str, *arguments: str) -> None:
    """Run `python *arguments` in a process forked by the server whose socket is `address`."""
    signals = {getattr(signal, name) for name in SIGNALS}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # until they can be forwarded
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "ignored": ignored_signals(),
        "limits": limits(),
        "ends_with_client": True,
    }
    connection, process = ask(address, request, inherited_files())
    if process == REFUSED:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        os.execv(python, [python, *arguments])

    # If a signal came just before recv() begins to wait, its handler in Python would not run. So
    # `select` also waits for the number that the handler in C writes to a socket.
    received, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    for number in signals - {*request["ignored"]}:
        signal.signal(number, lambda number, _: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    while connection not in (ready := select.select([connection, received], [], [])[0]):
        for number in received.recv(4096) if received in ready else ():
            with suppress(ProcessLookupError):
                os.kill(process, number)
    try:
        code = receive_number(connection)
    except RuntimeError:  # the server has exited and killed its programs
        code = -signal.SIGKILL
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def inherited_files() -> dict[int, int]:
    """Return the file descriptors that a child process would inherit, each mapped to itself."""
    files = {}
    for number in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):  # the descriptor of /dev/fd itself is closed now
            if os.get_inheritable(number):
                files[number] = number
    return files


def ignored_signals() -> list[int]:
    """Return the ignored signals, which a child process would also ignore."""
    numbers = [getattr(signal, name) for name in SIGNALS]
    return [number for number in numbers if signal.getsignal(number) == signal.SIG_IGN]


def limits() -> list:
    """Return this process's limits, umask, cores and priority.

    A forked process has the server's values instead.
    """
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    resources = [list(resource.getrlimit(getattr(resource, name))) for name in names]
    mask = os.umask(0)
    os.umask(mask)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return [resources, mask, cores, os.getpriority(os.PRIO_PROCESS, 0)]


def ask(address: str, request: dict, files: dict[int, int]) -> tuple[socket.socket, int]:
    """Request a process from the server. `files` maps the new process's descriptors to ours.

    Returns a connection and the process ID (or `REFUSED`). The server later sends the exit code
    over the connection.
    """
    if len(files) > MOST_FILES:
        raise ValueError(f"a forked program can inherit {MOST_FILES} open files, got {len(files)}")
    content = json.dumps({**request, "files": list(files)}).encode()
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
        socket.send_fds(connection, [NUMBER.pack(len(content))], list(files.values()))
        connection.sendall(content)
        return connection, receive_number(connection)
    except BaseException:
        connection.close()
        raise


def _arguments_for_python(program: str, *arguments: str) -> list[str] | None:
    """Return the arguments that make `python` run this command, or None if it cannot be forked."""
    folder, name = os.path.split(program)
    if folder != os.path.dirname(sys.executable):
        return None
    if name in ("python", "python3", os.path.basename(sys.executable)):
        return list(arguments) if can_be_forked(list(arguments)) else None
    with open(program, "rb") as file:
        return [program, *arguments] if file.read(2) == b"#!" else None


def can_be_forked(arguments: list[str]) -> bool:
    """Return True if a forked process can run Python with these arguments."""
    _, rest = split_options(arguments)
    return bool(rest) and (rest[0] in ("-m", "-c") or not rest[0].startswith("-"))


def split_options(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the leading Python options that a fork supports, and the remaining arguments."""
    number = 0
    while arguments[number : number + 1] in (["-u"], ["-B"]):
        number += 1
    return arguments[:number], arguments[number:]


def receive_number(connection: socket.socket) -> int:
    content = connection.recv(NUMBER.size)
    if not content:
        raise RuntimeError("the fork server has exited")
    return NUMBER.unpack(content)[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
