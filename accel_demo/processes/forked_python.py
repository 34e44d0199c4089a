"""Run a Python program as `python` would, but in a process that the fork server forks.

torchrun and Accelerate's launchers start the program named by PYTHON_EXEC for each worker, and
multiprocessing starts the one named by `set_executable`. The fork server writes a program that runs
this file, and names it in both places. This process asks the server for a process with its own
arguments, environment, working directory, open files and ignored signals. It passes signals on to
that process, and ends as it ends. If the server refuses, this process becomes the real Python.

This program imports little, so it starts much faster than torch could be imported.
"""

import json
import os
import signal
import socket
import struct
import sys
from contextlib import suppress

if sys.platform != "win32":  # which has no fork either
    import resource

NUMBER = struct.Struct("!i")
REFUSED = -1
SIGNALS = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCONT")
MOST_FILES = 250  # that one message can carry on Linux


def main(python: str, address: str, *arguments: str) -> None:
    """Do what `python` does with these arguments. `address` is the socket of the server."""
    signals = {getattr(signal, name) for name in SIGNALS}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # until the process exists
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

    def pass_on(number: int, _) -> None:
        with suppress(ProcessLookupError):
            os.kill(process, number)

    for number in signals - {*request["ignored"]}:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    try:
        code = receive_number(connection)
    except RuntimeError:  # the server has ended, which kills its programs
        code = -signal.SIGKILL
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def inherited_files() -> dict[int, int]:
    """Return the open files that a program started from here would inherit, by their number."""
    files = {}
    for number in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):  # /dev/fd itself, which is closed again
            if os.get_inheritable(number):
                files[number] = number
    return files


def ignored_signals() -> list[int]:
    """Return the signals that a program started from here would ignore."""
    numbers = [getattr(signal, name) for name in SIGNALS]
    return [number for number in numbers if signal.getsignal(number) == signal.SIG_IGN]


def limits() -> list:
    """Return limits, umask, cores and priority, which a forked process has from the server."""
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    resources = [list(resource.getrlimit(getattr(resource, name))) for name in names]
    mask = os.umask(0)
    os.umask(mask)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return [resources, mask, cores, os.getpriority(os.PRIO_PROCESS, 0)]


def ask(address: str, request: dict, files: dict[int, int]) -> tuple[socket.socket, int]:
    """Request a process from the server. `files` are its open files, by their number.

    Returns the connection on which the server will report the exit code, and the pid or `REFUSED`.
    """
    if len(files) > MOST_FILES:
        raise ValueError(f"a forked program can inherit {MOST_FILES} open files, not {len(files)}")
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


def can_be_forked(arguments: list[str]) -> bool:
    """Return whether a forked process can do what Python does with these arguments."""
    _, rest = split_options(arguments)
    return bool(rest) and (rest[0] in ("-m", "-c") or not rest[0].startswith("-"))


def split_options(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the options for Python itself, as far as a fork supports them, and the rest."""
    number = 0
    while arguments[number : number + 1] in (["-u"], ["-B"]):
        number += 1
    return arguments[:number], arguments[number:]


def receive_number(connection: socket.socket) -> int:
    content = connection.recv(NUMBER.size)
    if not content:
        raise RuntimeError("the server that forks processes has ended")
    return NUMBER.unpack(content)[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
