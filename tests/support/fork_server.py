"""Start Python programs quickly, by forking them from a server that has already imported torch.

`python program.py` spends 2 to 3 seconds importing torch before the program does anything. The
server imports torch and the other libraries once. It starts no threads and runs no computation, so
every forked program starts in the same clean state: with the requested environment, arguments and
working directory, default signal handlers, and newly seeded random number generators. If the
program is a launcher, its workers are forked as well. `ForkServer` starts the server, and
fork_client.py sends requests to it.

A forked program differs from a program that is started normally:
- Environment variables that Python or a library reads at startup would have no effect. If a request
  changes such a variable, the server refuses the request, and the program is started normally. The
  exception is the folder on PYTHONPATH with which `accel-demo audit` injects its observer: then the
  forked process loads the observer before it runs the program.
- A program that forgets an import may still work, because the server has imported the library.
- Warnings raised while a library is imported are printed to the server's stderr.
- SIGUSR2 prints the program's Python stack to stderr instead of killing the program.
- With `-u` or PYTHONUNBUFFERED, output is written line by line, because Python itself writes each
  argument of `print` and the newline separately, so the lines of two ranks could mix. An unfinished
  line is lost if the program is killed or calls `os._exit`.
- String hashes are equal in all programs, so sets have the same order on all ranks.
- At exit, a program runs its exit handlers and flushes its output, but does not finalize the
  interpreter, because finalization would copy memory for 2 seconds.

POSIX only.
"""

import atexit
import ctypes
import faulthandler
import fcntl
import gc
import importlib.util
import io
import json
import multiprocessing
import os
import random
import runpy
import select
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from contextlib import suppress
from pathlib import Path

import psutil

from accel_demo.processes.cleanup import adopt_orphans, kill_descendants, kill_tree
from tests.support import fork_client
from tests.support.fork_client import (
    ADDRESS,
    MOST_FILES,
    NUMBER,
    REFUSED,
    can_be_forked,
    limits,
    split_options,
)

# The libraries that our programs use. The modules of accel_demo are not preloaded: they are quick
# to import, and a program that forgets to import one of them must fail.
LIBRARIES = """torch torch._dynamo torch.distributed.run torch.nn.parallel torch.optim.lr_scheduler
torch.profiler torch.utils.data torch.utils.checkpoint torch.utils.tensorboard torchvision
accelerate accelerate.commands.launch accelerate.test_utils matplotlib.figure
matplotlib.backends.backend_agg matplotlib.backends.backend_svg numpy PIL.Image psutil safetensors
safetensors.torch tqdm yaml"""
# Python and the libraries read variables with these prefixes at startup.
READ_AT_START = """CUDA_ HF_ KMP_ LANG LC_ LD_ MALLOC_ MATPLOTLIB MKL_ MPL OMP_ PYTHON PYTORCH_
TORCH_ TORCHDYNAMO_ TQDM_ TZ XDG_""".split()
# Exceptions: these variables are not read at startup, or `_become` obeys them. torchrun sets
# TORCH_NCCL_… for its workers. Accelerate may remove CUDA_VISIBLE_DEVICES, but this variable has no
# effect without a GPU.
NOT_AT_START = set(
    """PYTHON_EXEC PYTHONUNBUFFERED TORCH_DISABLE_SHARE_RDZV_TCP_STORE
    TORCH_NCCL_ASYNC_ERROR_HANDLING""".split()
)
if not any(os.path.exists(f"/dev/{name}") for name in ("nvidiactl", "kfd", "dxg")):
    NOT_AT_START.add("CUDA_VISIBLE_DEVICES")

REPOSITORY = Path(__file__).parent.parent.parent
OBSERVER = REPOSITORY / "accel_demo" / "observer" / "inject" / "sitecustomize.py"


class ForkServer:
    """A running fork server. By default, it has the same environment as this process.

    `launch.start` uses the server if its environment contains `variables`. The program `python`
    works like Python, but runs each program in a fork of the server. When this process exits, the
    server removes its temporary folder and exits.
    """

    def __init__(self, environment: dict[str, str] | None = None):
        self._folder = tempfile.mkdtemp(prefix="fork-")
        address = str(Path(self._folder, "socket"))
        self.variables = {"ACCEL_DEMO_STARTER": fork_client.__file__, ADDRESS: address}
        self.python = str(Path(self._folder, "python"))
        words = [sys.executable, "-IS", fork_client.__file__, sys.executable, address]
        Path(self.python).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        Path(self.python).chmod(0o700)
        read, self._lifeline = os.pipe()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(64)
            server = [sys.executable, "-m", __name__, str(listener.fileno()), str(read)]
            self.process = subprocess.Popen(
                [*server, self.python],
                env=environment,
                cwd=REPOSITORY,
                pass_fds=[listener.fileno(), read],
                stdin=subprocess.DEVNULL,
            )
        os.close(read)

    def close(self) -> None:
        """Stop the server, and kill the programs that it has started."""
        os.close(self._lifeline)
        self.process.wait()


def main(listener: int, lifeline: int, python: str) -> None:
    """Run the server. In each process that is forked from it, run the requested program.

    `listener` and `lifeline` are file descriptors: the server's socket, and a pipe that closes when
    the process that started the server exits. A forked launcher starts its workers with the program
    at the path `python`.
    """
    del sys.path[0]  # each program inserts its own folder
    adopt_orphans()
    select.select([listener, lifeline], [], [])  # wait for a request before importing
    for name in LIBRARIES.split():
        if select.select([lifeline], [], [], 0)[0]:  # the parent process has exited
            return
        with suppress(ImportError):  # matplotlib and TensorBoard are optional
            importlib.import_module(name)
    if sys.platform == "linux" and len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("importing the libraries has started a thread: set OMP_NUM_THREADS=1")
    _make_forks_cheap()
    arguments = _serve(socket.socket(fileno=listener), lifeline, python)
    try:
        _run_program(arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        while (place := error.__traceback__) and place.tb_frame.f_code.co_filename == __file__:
            error.__traceback__ = place.tb_next  # a traceback begins in the program
        sys.last_value = error  # as Python does before it prints an error
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # wait for the program's threads, as Python does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the stream or its reader is closed
            stream.flush()
    if code == -signal.SIGINT:  # as Python does after KeyboardInterrupt
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 255)


def _make_forks_cheap() -> None:
    """Reduce the CPU time that each forked process costs, by a factor of four if it does nothing.

    Forking copies the server's page table, and writing to a page copies the page.
    """
    gc.collect()
    gc.freeze()  # so that garbage collection in a child copies no pages
    # At exit, a child would remove each operator that torch has registered while it was imported.
    for finalizer in weakref.finalize._registry:
        finalizer.atexit = False
    if sys.platform == "linux":
        # Collapse pages to huge pages, which have one entry in the page table instead of 512. If
        # the kernel cannot do that, forks only take longer.
        # https://man7.org/linux/man-pages/man2/madvise.2.html
        MADV_COLLAPSE, madvise = 25, ctypes.CDLL(None).madvise
        madvise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, permissions, *_ = line.split()
            if permissions == "rw-p":
                start, end = (int(address, 16) for address in addresses.split("-"))
                madvise(start, end - start, MADV_COLLAPSE)


def _serve(listener: socket.socket, lifeline: int, python: str) -> list[str]:
    """Fork a process for each request, and send its exit code to the client.

    Return only in the forked processes, with the arguments of the program to run.
    """
    running = {}  # maps each process ID to the connection to its client
    own_environment = dict(os.environ)
    woken, wake = socket.socketpair()
    woken.setblocking(False)
    wake.setblocking(False)
    # The server ignores Ctrl-C, but each forked program restores the original handler.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    selector = selectors.DefaultSelector()
    for file in (listener, woken, lifeline):
        selector.register(file, selectors.EVENT_READ)
    while True:
        ready = [key.fileobj for key, _ in selector.select()]
        if lifeline in ready:
            signal.set_wakeup_fd(-1)  # nothing reads from it while the programs are killed
            kill_descendants()
            shutil.rmtree(Path(python).parent, ignore_errors=True)
            os._exit(0)
        if woken in ready:
            woken.recv(4096)
            _report_ended(running, selector)
        for process, connection in running.items():
            if connection in ready and connection in selector.get_map():  # its client was killed
                selector.unregister(connection)
                with suppress(psutil.NoSuchProcess):
                    kill_tree(psutil.Process(process))
        if listener in ready:
            connection, _ = listener.accept()
            request, files = _receive_request(connection)
            if request is None:
                connection.close()
            elif _differs_at_start(request, own_environment):
                _send(connection, REFUSED)
                connection.close()
            elif (process := os.fork()) == 0:
                selector.close()
                for each in (listener, woken, wake, *running.values()):
                    each.close()
                os.close(lifeline)
                signal.signal(signal.SIGINT, handler)
                with _moved_above(max(request["files"]), connection) as connection:
                    try:
                        _become(request, files, python)
                    finally:
                        _send(connection, os.getpid())
                return request["arguments"]
            else:
                running[process] = connection
                if request.get("ends_with_client"):
                    selector.register(connection, selectors.EVENT_READ)
            for file in files:
                os.close(file)


def _receive_request(connection: socket.socket) -> tuple[dict | None, list[int]]:
    """Return the request and its file descriptors. The request is None if the client has exited."""
    header, files, _, _ = socket.recv_fds(connection, NUMBER.size, MOST_FILES)
    size = NUMBER.unpack(header)[0] if len(header) == NUMBER.size else 0
    with connection.makefile("rb") as file:
        content = file.read(size)
    return (json.loads(content) if content and len(content) == size else None), files


def _moved_above(number: int, connection: socket.socket) -> socket.socket:
    """Move the connection to a file descriptor above `number`."""
    with connection:
        above = fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, number + 1)
        return socket.socket(fileno=above)


def _send(connection: socket.socket, number: int) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # the client was killed
        connection.sendall(NUMBER.pack(number))


def _differs_at_start(request: dict, own_environment: dict[str, str]) -> bool:
    """Return True if a forked process cannot have the requested variables, limits or options."""
    environment, _ = _without_observer(request["environment"])
    names = {*environment, *own_environment} - NOT_AT_START
    changed = [name for name in names if environment.get(name) != own_environment.get(name)]
    return (
        any(name.startswith(tuple(READ_AT_START)) for name in changed)
        or request.get("limits", limits()) != limits()
        or not can_be_forked(request["arguments"])
    )


def _without_observer(environment: dict[str, str]) -> tuple[dict[str, str], bool]:
    """Return the environment without the observer's folder on PYTHONPATH, and if it was there."""
    folder, *others = environment.get("PYTHONPATH", "").split(os.pathsep)
    if folder != str(OBSERVER.parent):
        return environment, False
    rest = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    return rest | ({"PYTHONPATH": os.pathsep.join(others)} if others else {}), True


def _report_ended(running: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    with suppress(ChildProcessError):
        while True:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return
            if process not in running:  # an adopted orphan
                continue
            with running.pop(process) as connection:
                if connection in selector.get_map():
                    selector.unregister(connection)
                _send(connection, os.waitstatus_to_exitcode(status))


def _become(request: dict, files: list[int], python: str) -> None:
    """Prepare this forked process for the program that it will run."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    if request.get("new_session"):
        os.setsid()
    # Move all files to higher descriptors first: a file may occupy the descriptor of another file.
    aside = [fcntl.fcntl(file, fcntl.F_DUPFD, max(request["files"]) + 1) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(aside, request["files"], strict=True):
        os.dup2(file, number)
        os.close(file)
    options, request["arguments"] = split_options(request["arguments"])
    sys.dont_write_bytecode |= "-B" in options
    unbuffered = "-u" in options or bool(request["environment"].get("PYTHONUNBUFFERED"))
    sys.stdout = sys.__stdout__ = _text_output(1, unbuffered, sys.stdout.errors)
    sys.stderr = sys.__stderr__ = _text_output(2, unbuffered, sys.stderr.errors)
    faulthandler.register(signal.SIGUSR2)  # print the Python stack: tests use this to find hangs
    os.environ.clear()
    os.environ.update(request["environment"])
    # The program starts with only one thread, so it can safely fork processes itself.
    os.environ.setdefault("ACCEL_DEMO_START_METHOD", "fork")
    os.environ["PYTHON_EXEC"] = python  # torchrun starts its workers with this program
    multiprocessing.set_executable(python)
    os.chdir(request["folder"])
    tempfile.tempdir = None  # Python recomputes it from the new environment
    random.seed()
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].seed()
    if _without_observer(request["environment"])[1]:
        _load_observer()


def _load_observer() -> None:
    """Load the observer as Python does at startup. Any other `sitecustomize` is loaded already."""
    spec = importlib.util.spec_from_file_location("observer_in_a_fork", OBSERVER)
    assert spec and spec.loader
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _text_output(number: int, unbuffered: bool, errors: str | None) -> io.TextIOWrapper:
    """Open a file descriptor as Python opens stdout and stderr, but write whole lines with `-u`."""
    raw = io.FileIO(number, "w", closefd=False)
    buffered_by_line = number == 2 or raw.isatty()
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),
        errors=errors,
        line_buffering=unbuffered or buffered_by_line,
    )


def _run_program(arguments: list[str]) -> None:
    """Run a file, a folder with a __main__.py, `-m MODULE` or `-c CODE` as `python` does."""
    kind, *others = arguments
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = ["-m", *others[1:]]
        runpy._run_module_as_main(others[0])  # as `python -m` does
    elif kind == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *others[1:]]
        exec(compile(others[0], "<string>", "exec"), module.__dict__)
    elif os.path.isdir(kind):
        sys.path.insert(0, os.path.abspath(kind))
        sys.argv = arguments
        runpy._run_module_as_main("__main__", alter_argv=False)
    else:
        sys.path.insert(0, str(Path(kind).resolve().parent))
        sys.argv = arguments
        module.__file__ = os.path.abspath(kind)
        exec(compile(Path(kind).read_bytes(), kind, "exec"), module.__dict__)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
