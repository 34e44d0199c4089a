"""Start Python programs quickly: fork each of them from a server that has already imported torch.

`python program.py` spends 2 to 3 seconds importing torch before the program does anything. The
server imports torch and the other libraries once. It starts no thread and computes nothing, so each
program that is forked from it starts from the same clean state: its own environment, arguments and
working directory, default signal handlers, and freshly seeded random numbers.

What is different from a real start:
- a variable that is read when Python or a library starts has no effect, so the server refuses such
  a request, and the program is started for real;
- a library that a program forgets to import may be there already;
- at its end, the program runs its exit handlers and writes its output, but Python is not taken
  apart module by module: that takes 2 seconds of copying memory that no program looks at again.
So some of the tests still start real processes. POSIX only.
"""

import atexit
import gc
import importlib
import json
import os
import random
import runpy
import select
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

# The libraries our programs use. Our own modules are not among them: they are quick to import, and
# a program must not find one that it forgot to import.
LIBRARIES = """torch torch._dynamo torch.distributed.run torch.nn.parallel torch.optim.lr_scheduler
torch.profiler torch.utils.data torch.utils.checkpoint torch.utils.tensorboard torchvision
accelerate accelerate.commands.launch accelerate.test_utils matplotlib.figure
matplotlib.backends.backend_agg matplotlib.backends.backend_svg numpy PIL.Image psutil safetensors
safetensors.torch tqdm yaml"""
READ_AT_START = ("CUDA_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "PYTHON", "TORCH_")
ADDRESS = "ACCEL_DEMO_FORK_SERVER"  # the variable with the socket of the server to use, if any
NUMBER = struct.Struct("!i")
REFUSED = -1


class ForkServer:
    """A running server with this `environment`, or ours. It ends with whoever has started it."""

    def __init__(self, environment: dict[str, str] | None = None):
        self._folder = tempfile.mkdtemp(prefix="fork-")
        self.address = str(Path(self._folder, "socket"))
        read, self._lifeline = os.pipe()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(64)
            code = f"from accel_demo.lab.fork_server import main; main({listener.fileno()}, {read})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                env=environment,
                pass_fds=[listener.fileno(), read],
                stdin=subprocess.DEVNULL,
            )
        os.close(read)

    def close(self) -> None:
        """End the server, and kill what it has started and is still running."""
        os.close(self._lifeline)
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


class ForkedProcess:
    """A program that the server has started, with some methods of `subprocess.Popen`."""

    def __init__(self, arguments: list[str], connection: socket.socket, pid: int):
        self.args, self.pid, self.returncode = arguments, pid, None
        self._connection = connection

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = _receive_number(self._connection)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout) from None
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_program(
    command: list[str],
    environment: dict[str, str],
    cwd: str | Path,
    stdout,
    stderr,
    new_session: bool = False,
    ignored_signal: int | None = None,
) -> subprocess.Popen | ForkedProcess:
    """Start a command; a Python program is forked from the server that `environment` names.

    The command is started for real if `environment` names no server, if the server refuses, or if
    the command is not a Python program. `stdout` and `stderr` are open files. `new_session` makes
    the process the leader of a new session. `ignored_signal` is ignored in it, as after the shell's
    `trap '' SIGNAL`.
    """
    program, *arguments = command
    program = shutil.which(program, path=environment.get("PATH")) or program
    address = environment.get(ADDRESS)
    if address and (python_arguments := _for_python(program, arguments)):
        request = [python_arguments, environment, str(cwd), new_session, ignored_signal]
        content = json.dumps(request).encode()
        with ExitStack() as stack:
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.connect(address)
            files = [stdout.fileno(), stderr.fileno()]
            socket.send_fds(connection, [NUMBER.pack(len(content))], files)
            connection.sendall(content)
            pid = _receive_number(connection)
            if pid != REFUSED:
                stack.pop_all()  # the connection stays open
                return ForkedProcess(command, connection, pid)

    def ignore() -> None:
        signal.signal(ignored_signal, signal.SIG_IGN)

    files = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr}
    options = {"start_new_session": new_session, "cwd": cwd, "env": environment}
    options["preexec_fn"] = None if ignored_signal is None else ignore
    return subprocess.Popen([program, *arguments], **files, **options)


def main(listener: int, lifeline: int) -> None:
    """Be the server; in each process forked from it, run the requested program."""
    sys.path.remove("")  # a program has its own folder there
    select.select([listener, lifeline], [], [])  # nothing is imported before the first request
    for name in LIBRARIES.split():
        if select.select([lifeline], [], [], 0)[0]:  # whoever has started this server has ended
            return
        with suppress(ImportError):  # matplotlib and TensorBoard need not be installed
            importlib.import_module(name)
    if sys.platform == "linux" and len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("importing the libraries has started a thread: set OMP_NUM_THREADS=1")
    gc.collect()
    gc.freeze()  # so that collecting garbage in a child copies no pages
    arguments = _serve(socket.socket(fileno=listener), lifeline)
    try:
        _run_program(arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # wait for the program's threads, as Python does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or nobody reads it any more
            stream.flush()
    os._exit(code & 255)


def _for_python(program: str, arguments: list[str]) -> list[str] | None:
    """Return the arguments that Python would get for this command, or None if it is not Python."""
    ours = Path(sys.executable).parent
    if Path(program).parent != ours:
        return None
    if Path(program).name in ("python", "python3", Path(sys.executable).name):
        is_known = arguments and (arguments[0] in ("-m", "-c") or not arguments[0].startswith("-"))
        return arguments if is_known else None
    with open(program, "rb") as file:
        return [program, *arguments] if file.read(2) == b"#!" else None


def _receive_number(connection: socket.socket) -> int:
    content = connection.recv(NUMBER.size)
    if not content:
        raise RuntimeError("the server that forks processes has ended")
    return NUMBER.unpack(content)[0]


def _serve(listener: socket.socket, lifeline: int) -> list[str]:
    """Fork a process for each request, and report how it ended. Returns in those processes only."""
    running = {}  # the connection to report to, by process
    own_environment = dict(os.environ)
    woken, wake = socket.socketpair()
    woken.setblocking(False)
    wake.setblocking(False)
    # Ctrl-C is for whoever has started the server; a program handles it as after a real start.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    selector = selectors.DefaultSelector()
    for file in (listener, woken, lifeline):
        selector.register(file, selectors.EVENT_READ)
    while True:
        ready = [key.fileobj for key, _ in selector.select()]
        if lifeline in ready:
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            os._exit(0)
        if woken in ready:
            woken.recv(4096)
            _report_ended(running)
        if listener in ready:
            connection, _ = listener.accept()
            header, files, _, _ = socket.recv_fds(connection, NUMBER.size, 2)
            content = connection.recv(NUMBER.unpack(header)[0], socket.MSG_WAITALL)
            arguments, environment, *others = json.loads(content)
            if _differ_at_start(own_environment, environment):
                connection.sendall(NUMBER.pack(REFUSED))
                connection.close()
            elif (process := os.fork()) == 0:
                selector.close()
                for each in (listener, woken, wake, connection, *running.values()):
                    each.close()
                os.close(lifeline)
                signal.signal(signal.SIGINT, handler)
                _become(files, environment, *others)
                return arguments
            else:
                running[process] = connection
                connection.sendall(NUMBER.pack(process))
            for file in files:
                os.close(file)


def _differ_at_start(one: dict[str, str], other: dict[str, str]) -> bool:
    """Whether the environments differ in a variable that Python or a library reads at its start."""
    changed = [name for name in one | other if one.get(name) != other.get(name)]
    return any(name.startswith(READ_AT_START) for name in changed)


def _report_ended(running: dict[int, socket.socket]) -> None:
    with suppress(ChildProcessError):
        while True:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return
            with running.pop(process) as connection, suppress(BrokenPipeError):
                connection.sendall(NUMBER.pack(os.waitstatus_to_exitcode(status)))


def _become(files: list, environment: dict, cwd: str, new_session: bool, ignored: int | None):
    """Give this forked process what belongs to the program it will run."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if ignored is not None:
        signal.signal(ignored, signal.SIG_IGN)
    if new_session:
        os.setsid()
    for file, number in zip(files, (1, 2), strict=True):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    # This process has one thread and has computed nothing: it may fork, and so pass torch on.
    os.environ["ACCEL_DEMO_START_METHOD"] = "fork"
    os.chdir(cwd)
    tempfile.tempdir = None  # a library may have looked it up, in the server's environment
    random.seed()
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].seed()


def _run_program(arguments: list[str]) -> None:
    """Do what `python *arguments` does, from `__main__` on."""
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
    else:
        sys.path.insert(0, str(Path(kind).resolve().parent))
        sys.argv = arguments
        module.__file__ = kind
        exec(compile(Path(kind).read_bytes(), kind, "exec"), module.__dict__)
