"""Shared fixtures and helpers, mainly for starting processes and for resetting global state."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from accel_demo.processes import launch
from accel_demo.processes.cleanup import adopt_orphans, kill_all, kill_tree
from accel_demo.processes.environment import LOOPBACK, rank_environment
from tests.support.fork_server import ForkServer

# Use one thread per process: many processes share the cores, and results depend on the number of
# threads, because it changes the order of additions. Torch reads the variable on import.
os.environ["OMP_NUM_THREADS"] = "1"

import numpy  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

# Hide the GPUs, so that tests behave the same on every machine. GPU tests pass VISIBLE_GPUS to
# the processes that they start. `pytest -n` starts its workers after hiding the GPUs, so a worker
# reads the user's value from another variable.
if "PYTEST_XDIST_WORKER" in os.environ and os.environ.get("CUDA_VISIBLE_DEVICES") == "-1":
    del os.environ["CUDA_VISIBLE_DEVICES"]
    if "USERS_VISIBLE_GPUS" in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["USERS_VISIBLE_GPUS"]
elif "CUDA_VISIBLE_DEVICES" in os.environ:
    os.environ["USERS_VISIBLE_GPUS"] = os.environ["CUDA_VISIBLE_DEVICES"]
GPUS = torch.cuda.device_count()
VISIBLE_GPUS = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES")}
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
os.environ["HF_HOME"] = os.devnull  # hides the user's default config from `accelerate launch`

# If a shell starts pytest in the background, pytest and its child processes ignore SIGINT. Restore
# Python's default handler.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

GRACE = 8  # seconds; a process that has imported torch takes up to 2 s to exit, or more under load
REPOSITORY = Path(__file__).parent.parent
BIN = Path(sys.executable).parent  # contains accelerate, torchrun and accel-demo

adopt_orphans()  # makes orphans children of this process, so that tests can find them (Linux only)


def pytest_addoption(parser):
    parser.addoption(
        "--real", action="store_true", help="start every process normally, without the fork server"
    )
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in a random order")


def pytest_configure(config):
    global always_real
    always_real = config.getoption("--real")


def pytest_collection_modifyitems(config, items):
    """Run the slowest files first, so that all pytest workers finish at about the same time.

    These are the files with the longest time limits, then the largest ones. With `--shuffle`,
    shuffle all files and their tests instead.
    """
    limits = {}
    for item in items:
        marker = item.get_closest_marker("timeout")
        limits[item.path] = max(limits.get(item.path, 0), marker.args[0] if marker else 0)
    place = {path: (-limit, -path.stat().st_size) for path, limit in limits.items()}
    seed = config.getoption("--shuffle")
    if seed is not None:
        order = random.Random(seed)
        place = {file: order.random() for file in sorted(place)}
        order.shuffle(items)
    items.sort(key=lambda item: place[item.path])  # a stable sort


@pytest.fixture(autouse=True)
def reset_state():
    """Set the random seeds and the number of threads before each test.

    After the test, restore the environment and the working directory. The test fails if it changes
    one of the `settings_of_torch` without restoring it.
    """
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if can_fork():
        os.environ["PYTHON_EXEC"] = fork_server().python  # so that launchers fork their workers
        multiprocessing.set_executable(fork_server().python)
    environment, folder, settings = dict(os.environ), os.getcwd(), settings_of_torch()
    yield
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    assert settings_of_torch() == settings


def settings_of_torch() -> dict:
    return {
        "default dtype": torch.get_default_dtype(),
        "gradients are recorded": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "a process group exists": dist.is_initialized(),
    }


@pytest.fixture
def start():
    """`start(command, timeout=…, **environment)` runs a command with a time limit.

    It returns the command's `returncode`, `stdout` and `stderr`. The test fails on a timeout, or if
    a process that the command started is still running after the command has exited.
    """
    return run_to_end


def run_to_end(command, timeout=120, cwd=REPOSITORY, real=False, **environment):
    return run_all([command], timeout, cwd, real, [environment])[0]


def run_all(
    commands, timeout=120, cwd=REPOSITORY, real=False, environments=None
) -> list[SimpleNamespace]:
    """Run commands in parallel. As soon as one of them fails, kill the others.

    Return the returncode, stdout and stderr of each command. The test fails on a timeout, or if
    the commands leave processes running.
    """
    before = processes_below_this_one()
    with ExitStack() as stack:
        files = [
            [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in "12"] for _ in commands
        ]
        processes = [
            start_process(command, *own_files, cwd, real, **environment)
            for command, own_files, environment in zip(
                commands, files, environments or [{}] * len(commands), strict=True
            )
        ]
        ended = wait_for_all(processes, timeout)
        orphans = left_behind(before)
        results = [
            SimpleNamespace(
                returncode=process.returncode, stdout=text_of(stdout), stderr=text_of(stderr)
            )
            for process, (stdout, stderr) in zip(processes, files, strict=True)
        ]
    printed = "\n".join(result.stdout + result.stderr for result in results)
    assert ended, f"{commands} took more than {timeout} s\n{printed}"
    assert not orphans, f"{commands} left {orphans} behind\n{printed}"
    return results


def run_ranks(arguments, processes, timeout=120, cwd=REPOSITORY, real=False, **environment):
    """Run a Python program in connected processes, as `torchrun --nproc-per-node N` does.

    Return the combined stdout and stderr of the ranks. The returncode is 0 if no rank failed.
    Otherwise, it is that of the lowest failed rank. Killed ranks matter only if no other failed.
    """
    with rank_environments(processes) as environments:
        commands = [["python", *arguments]] * processes
        environments = [{**environment, **rank_variables} for rank_variables in environments]
        results = run_all(commands, timeout, cwd, real, environments)
    codes = [result.returncode for result in results]
    failed = [code for code in codes if code not in (0, -signal.SIGKILL)] or [*filter(None, codes)]
    return SimpleNamespace(
        returncode=failed[0] if failed else 0,
        stdout="".join(result.stdout for result in results),
        stderr="".join(result.stderr for result in results),
    )


@contextmanager
def rank_environments(processes: int, rank_0_keeps_the_store: bool = False):
    """Yield a list with the environment variables of each rank.

    This process hosts the TCP store, as torchrun would. If `rank_0_keeps_the_store` is set, rank 0
    hosts the store.
    """
    if rank_0_keeps_the_store:  # as under srun and mpirun
        port = launch.free_port()
        yield [rank_environment(rank, processes, port) for rank in range(processes)]
        return
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield [
        {**rank_environment(rank, processes, store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        for rank in range(processes)
    ]
    del store


def run_training(program, arguments, processes: int, timeout=120):
    """Run a train file or another program in `processes` processes, without a launcher."""
    if processes == 1 and "ddp" not in str(program):
        return run_to_end(["python", program, *arguments], timeout)
    return run_ranks([program, *arguments], processes, timeout)


def start_process(command, stdout, stderr, cwd=REPOSITORY, real=False, **environment):
    """Start a command. Return a `subprocess.Popen`, or a `ForkedProcess` with the same methods.

    A Python program is forked from the fork server, which takes milliseconds instead of seconds.
    If `real` is set, the command and its child processes start normally. Some tests need this,
    because a forked program does not start or exit exactly like a normal one.
    """
    options = {name: environment.pop(name) for name in OPTIONS if name in environment}
    command = [sys.executable if word == "python" else str(word) for word in command[:1]] + [
        str(word) for word in command[1:]
    ]
    if (BIN / command[0]).exists():
        command[0] = str(BIN / command[0])
    if real or not can_fork():
        environment |= {"PYTHON_EXEC": None, launch.STARTER: None}
    else:
        environment = {**fork_server().variables, **environment}
    environment = {**os.environ, **environment}
    environment = {name: value for name, value in environment.items() if value is not None}
    environment.pop("PYTEST_CURRENT_TEST", None)
    return launch.start(command, environment, stdout, stderr, cwd=cwd, **options)


OPTIONS = ("new_session", "ignored_signal")


def can_fork() -> bool:
    return not always_real and hasattr(os, "fork")


@cache
def fork_server() -> ForkServer:
    """Start the fork server of this test process. Later calls return the same server."""
    return ForkServer()


def pytest_sessionfinish():
    if fork_server.cache_info().currsize:
        fork_server().close()


def wait_for_all(processes: list, timeout: float) -> bool:
    """Wait until all processes have exited, one of them has failed, or the timeout has expired.

    After that, kill the processes that are still running, and their descendants. Return False on a
    timeout.
    """
    deadline = time.monotonic() + timeout
    running = list(processes)
    while running and time.monotonic() < deadline:
        with suppress(subprocess.TimeoutExpired):
            running[0].wait(0.05 if len(running) > 1 else deadline - time.monotonic())
        running = [process for process in running if process.poll() is None]
        if any(process.returncode for process in processes):
            break
    is_over = not running or any(process.returncode for process in processes)
    for process in running:
        kill_tree(process)
        process.wait(10)
    return is_over


def processes_below_this_one() -> set[psutil.Process]:
    if can_fork():
        fork_server()
    return set(psutil.Process().children(recursive=True))


def left_behind(before: set[psutil.Process]) -> list[str]:
    """Kill the descendants of this process that are not in `before`, and return their descriptions.

    Processes that exit within `GRACE` seconds are neither killed nor returned. Orphans are found,
    because they become children of this process. Except for the fork server's, descendants of a
    process in `before` are ignored: for example, an open browser can start processes at any time.
    """
    server = {psutil.Process(fork_server().process.pid)} if can_fork() else set()
    started = processes_below_this_one() - before
    started = [
        process for process in started if not before.intersection(parents_of(process)) - server
    ]
    described = {process: describe(process) for process in started}
    _, orphans = psutil.wait_procs(started, timeout=GRACE)
    kill_all(orphans)
    psutil.wait_procs(orphans, timeout=5)
    return [described[process] for process in orphans]


def parents_of(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.parents()
    except psutil.NoSuchProcess:
        return []


def describe(process: psutil.Process) -> str:
    try:
        command, parent = " ".join(process.cmdline()), process.ppid()
    except psutil.NoSuchProcess:
        command, parent = "ended", "?"
    return f"pid={process.pid}, child of {parent}: {command[:300]}"


def text_of(file) -> str:
    file.seek(0)
    return file.read()


@pytest.fixture
def train(tmp_path):
    """`train(file, *flags, processes=N)` calls `train_in` with a new folder."""

    def train(file: str, *flags, processes: int = 1, name: str | None = None) -> Path:
        run_dir = tmp_path / (name or f"{Path(file).stem}-{processes}")
        return train_in(run_dir, file, *flags, processes=processes)

    return train


def train_in(run_dir: Path, file: str, *flags, processes: int = 1) -> Path:
    """Run a train file in `processes` connected processes. Assert that there were so many.

    The processes are forked, with the environment variables that torchrun would set. With `--real`,
    the real launcher starts them. Return `run_dir`.
    """
    arguments = [*flags, "--run-dir", run_dir]
    if not can_fork():
        command = [*launcher(file, processes), f"accel_demo/{file}", *arguments]
        result = run_to_end(command, real=True)
    else:
        result = run_training(f"accel_demo/{file}", arguments, processes)
    assert result.returncode == 0, result.stdout + result.stderr
    environment = json.loads((run_dir / "environment.json").read_text())
    assert (environment["processes"], environment["device"]) == (processes, "cpu")
    connected = processes > 1 or file == "train_ddp.py"
    assert environment["backend"].endswith("gloo") == connected
    return run_dir


@pytest.fixture(scope="session")
def together(tmp_path_factory):
    """`together(function, N, **arguments)` calls a function of a test module in N processes.

    It asserts that N processes were connected, and returns a list with the result of each rank.
    `torch.save` must be able to save the arguments and the results. The test fails if the function
    raises an error in any process.
    """

    def together(function, processes: int, timeout=120, environment=None, **arguments) -> list:
        folder = tmp_path_factory.mktemp("together")
        torch.save(arguments, folder / "arguments.pt")
        target = f"{function.__module__}:{function.__name__}"
        command = ["-m", "tests.together", target, processes, folder]
        result = run_ranks(command, processes, timeout, **(environment or {}))
        assert result.returncode == 0, result.stdout + result.stderr
        assert f"{processes} connected process" in result.stdout
        files = [folder / f"{rank}.pt" for rank in range(processes)]
        return [torch.load(file, weights_only=False) for file in files]

    return together


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    """Start the system's Chromium with a new, empty profile."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("chromium-browser")
    assert program, "the browser tests need Chromium: apt-get install chromium"
    quiet = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    quiet += "--disable-background-networking --disable-component-update --disable-sync"
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("profile"), executable_path=program, args=quiet.split()
        )
        yield context
        context.close()


@pytest.fixture
def open_page(chromium):
    """`open_page(file, width=1280)` opens an HTML file and returns the Playwright page.

    `site` is the folder whose files the page may request, and `anchor` a section to open. After the
    test, the fixture asserts that the page has requested no other file, written nothing to the
    browser's console and raised no error.
    """
    pages, problems = [], []

    def open_page(
        file: Path,
        width: int = 1280,
        height: int = 900,
        site: Path | None = None,
        anchor: str = "",
    ):
        page, own_url = chromium.new_page(), Path(file).resolve().as_uri()
        pages.append(page)

        def only_own_url(route):
            url = route.request.url
            if url == own_url or site and url.startswith(f"{site.resolve().as_uri()}/"):
                route.continue_()
            else:
                problems.append(f"requested {route.request.url}")
                route.abort()

        page.route("**/*", only_own_url)
        page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.set_viewport_size({"width": width, "height": height})
        page.goto(own_url + anchor)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert problems == []


def launcher(file: str, processes: int) -> list[str]:
    """Return the part of a user's launch command that precedes the name of the train file."""
    if file == "train.py":
        config = {1: "cpu.yaml", 2: "cpu_two_processes.yaml"}[processes]
        return ["accelerate", "launch", "--config_file", f"accelerate_configs/{config}"]
    if file == "train_ddp.py":
        return ["torchrun", "--standalone", "--nproc-per-node", str(processes)]
    assert processes == 1, f"{file} supports only one process"
    return ["python"]
