"""Start processes: `spawn` for functions, `run_to_end` and `start` for commands.

`spawn` calls a function in several processes, with the same environment variables as torchrun.
`run_to_end` runs a command and waits until it exits. `start` starts a command without waiting.
"""

import errno
import logging
import os
import pickle
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache, partial
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing import (
    forkserver,
    get_all_start_methods,
    resource_tracker,
    set_forkserver_preload,
)
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from accel_demo.errors import UserError, one_line_errors, say
from accel_demo.processes.cleanup import SIGNALS, kill_descendants, kill_tree, signals_to_catch
from accel_demo.processes.environment import QUIET, environment_for, number_in, rank_environment

PRELOADED = ("torch._dynamo",)  # slow to import; the first optimizer needs it
STARTER = "ACCEL_DEMO_STARTER"  # environment variable that changes how `start` works
PORT_ADVICE = "Set MASTER_PORT to a free port, or leave it unset."


def spawn(
    function: Callable,
    world_size: int,
    *arguments,
    preloaded: tuple[str, ...] = PRELOADED,
    stop_at_once: bool = False,
) -> list[Any]:
    """Call `function(*arguments)` in `world_size` processes, and return the results by rank.

    The processes have the same environment variables as under torchrun on one machine. They connect
    on port MASTER_PORT, or on any free port if it is not set. The function must be importable by
    its module and name; arguments and results are pickled. If this process receives a stop signal,
    it forwards the signal to the processes. If `stop_at_once` is set, or if some processes have not
    started yet, it kills the processes instead.

    On Linux, a server imports the modules `preloaded` once, and all processes are forked from it.
    On other systems, each process imports its modules itself: Windows cannot fork, and on macOS a
    fork is not safe once system libraries are loaded.

    Raises `UserError` if the port is in use, and `ProcessRaisedException` if the function raises an
    error in a process. If a process exits with code 2, this process also exits with code 2. If a
    process exits with a different code or is killed by a signal, this process prints a message and
    exits with code 1.
    Source: https://docs.python.org/3/library/multiprocessing.html#contexts-and-start-methods
    """
    # Imported here, because torch takes seconds to import and `start` does not need it.
    from torch import multiprocessing

    if world_size < 1:
        raise UserError(f"--nproc must be at least 1, got {world_size}")
    port = free_port(number_in("MASTER_PORT", 0))
    if world_size > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    start_preloading(preloaded)
    ranks: Any = None  # torch's handle to the processes, set once all have started
    starter, stopped_by = os.getpid(), None

    def asked_to_stop(number, frame):
        # This may run inside `os.fork`, which drops exceptions, so nothing is raised here.
        nonlocal stopped_by
        if os.getpid() != starter:  # in a forked rank that has not set its own handlers yet
            signal.signal(number, earlier[number])
            os.kill(os.getpid(), number)
        elif stop_at_once or ranks is None:
            stopped_by = number
            kill_descendants(spare_resource_tracker=True)
        else:
            for process in ranks.processes:
                if process.is_alive():
                    os.kill(process.pid, number)

    with tempfile.TemporaryDirectory() as folder:
        earlier = {number: signal.signal(number, asked_to_stop) for number in signals_to_catch()}
        try:
            orders = (world_size, port, Path(folder), stop_at_once, function, arguments)
            ranks = multiprocessing.start_processes(
                _as_rank, orders, world_size, join=False, start_method=start_method()
            )
            while stopped_by is None and not ranks.join():
                pass
        except multiprocessing.ProcessExitedException as error:
            if error.exit_code == 2:
                sys.exit(2)  # the process has already printed the error
            if stopped_by is None:
                ended = error.signal_name or f"exit code {error.exit_code}"
                print(f"error: rank {error.error_index} died ({ended})", file=sys.stderr)
                sys.exit(1)
        except (OSError, EOFError):
            if stopped_by is None:  # otherwise we have killed the forkserver ourselves
                raise
        finally:
            if stopped_by is not None:
                # including processes started after the signal
                kill_descendants(spare_resource_tracker=True)
            for number, handler in earlier.items():
                signal.signal(number, handler)
        if stopped_by == signal.SIGINT:
            raise KeyboardInterrupt
        if stopped_by is not None:
            say("stopped")
            sys.exit(128 + stopped_by)
        return [_read_result(Path(folder), rank) for rank in range(world_size)]


def start_preloading(preloaded: tuple[str, ...]) -> None:
    """Start the server from which `spawn` forks. It imports `preloaded` in the background."""
    if start_method() == "forkserver":
        start_server(preloaded)


def start_server(preloaded: tuple[str, ...]) -> None:
    """Start the multiprocessing module's fork server, if it is not running yet.

    The server and the processes that it forks block `SIGNALS`. Otherwise, a signal to all processes
    of a terminal or a job would kill the server, and with it the connection to these processes.
    """
    set_forkserver_preload(list(preloaded))
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    resource_tracker.ensure_running()  # unblocks SIGINT and SIGTERM
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)


def start_method() -> str:
    """Return the start method of `spawn`. ACCEL_DEMO_START_METHOD overrides the default.

    "fork" is the fastest, but only safe if this process has one thread and has not used a GPU.
    """
    default = "forkserver" if sys.platform == "linux" else "spawn"
    chosen, known = os.environ.get("ACCEL_DEMO_START_METHOD", default), get_all_start_methods()
    if chosen not in known:
        raise UserError(f"ACCEL_DEMO_START_METHOD must be one of {', '.join(known)}, got {chosen}")
    return chosen


def run_to_end(
    command: str | list[str],
    time_limit: float = 120,
    *,
    environment: dict[str, str] | None = None,
    cwd: Path | None = None,
    **changes: str,
) -> SimpleNamespace:
    """Run a command until it exits, and return its `returncode`, `stdout` and `stderr`.

    After `time_limit` seconds or on Ctrl-C, the command and all its descendants are killed. After a
    timeout, `returncode` is None.

    By default, the command runs in the current environment with `changes`. It uses the CPU with one
    thread, and the `python`, `accelerate` and `torchrun` of this Python installation. If
    `environment` is given, the command runs in exactly that environment.
    """
    if environment is not None and changes:
        raise ValueError("pass either environment or changes, not both")
    words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
    if environment is None:
        environment = environment_for({**QUIET, **changes})
    text_file = partial(tempfile.TemporaryFile, "w+", encoding="utf-8", errors="replace")
    with text_file() as stdout, text_file() as stderr:
        process = start(words, environment, stdout, stderr, cwd=cwd)
        try:
            returncode = process.wait(timeout=time_limit)
        except subprocess.TimeoutExpired:
            returncode = None
        finally:
            if process.poll() is None:
                kill_tree(process)
                process.wait()
        for file in (stdout, stderr):
            file.seek(0)
        return SimpleNamespace(returncode=returncode, stdout=stdout.read(), stderr=stderr.read())


def start(
    command: list[str],
    environment: dict[str, str],
    stdout,
    stderr,
    *,
    stdin=subprocess.DEVNULL,
    cwd: str | Path | None = None,
    new_session: bool = False,
    ignored_signal: int | None = None,
) -> subprocess.Popen:
    """Start a command, and return the process without waiting for it.

    `new_session` makes the process the leader of a new session. The process ignores
    `ignored_signal`, as after `trap '' SIGNAL` in a shell.

    If `environment` contains ACCEL_DEMO_STARTER, the path of a Python file, this function calls
    `start` in that file with the same arguments. That `start` returns an object with the methods of
    `subprocess.Popen`, or None to have the command started normally. Our tests use this to start
    Python programs faster.
    """
    program, *arguments = command
    command = [shutil.which(program, path=environment.get("PATH")) or program, *arguments]
    if path := environment.get(STARTER):
        process = _imported(path).start(
            command,
            environment,
            stdout,
            stderr,
            stdin=stdin,
            cwd=cwd,
            new_session=new_session,
            ignored_signal=ignored_signal,
        )
        if process is not None:
            return process
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        encoding="utf-8",
        errors="replace",
        start_new_session=new_session,
        cwd=cwd,
        env=environment,
        preexec_fn=None if ignored_signal is None else partial(_ignore, ignored_signal),
    )


@cache
def _imported(path: str) -> ModuleType:
    spec = spec_from_file_location("accel_demo_starter", path)
    assert spec and spec.loader, f"{STARTER} must be the path of a Python file, got {path}"
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _ignore(number: int) -> None:
    signal.signal(number, signal.SIG_IGN)


def free_port(port: int = 0, advice: str = PORT_ADVICE) -> int:
    """Return `port`, or any free port if `port` is 0. Raises `UserError` if it cannot be used."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OverflowError:
            raise UserError(f"MASTER_PORT must be from 0 to 65535, got {port}") from None
        except OSError as error:
            is_in_use = error.errno == errno.EADDRINUSE
            problem = "is in use" if is_in_use else f"cannot be used ({error.strerror})"
            raise UserError(f"port {port} {problem}. {advice}") from None
        return probe.getsockname()[1]


def _as_rank(
    rank: int,
    world_size: int,
    port: int,
    folder: Path,
    stop_at_once: bool,
    function: Callable,
    arguments: tuple,
) -> None:
    import torch

    from accel_demo.processes.lost_processes import report_lost_processes

    if start_method() == "forkserver":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    os.environ.update(rank_environment(rank, world_size, port))
    if world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # the server may have started before OMP_NUM_THREADS was set
    if stop_at_once:  # a terminal also sends Ctrl-C to this process: exit without a traceback
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    with one_line_errors(), report_lost_processes():
        result = function(*arguments)
        if result is not None:
            (folder / f"{rank}.pickle").write_bytes(pickle.dumps(result))


def _read_result(folder: Path, rank: int) -> Any:
    file = folder / f"{rank}.pickle"
    return pickle.loads(file.read_bytes()) if file.exists() else None
