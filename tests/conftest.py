"""The one way a test starts processes."""

import inspect
import json
import os
import shutil
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from accel_demo.lab.launch import LOOPBACK

# One thread each, here and in what is started: the processes of a test share two cores, and sums
# come in the same order everywhere. It counts only because torch is not imported yet.
os.environ["OMP_NUM_THREADS"] = "1"

import torch  # noqa: E402

# Only a test that asks for the GPUs sees them; all others do the same on every machine.
GPUS = torch.cuda.device_count()
VISIBLE_GPUS = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES")}
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

REPOSITORY = Path(__file__).parent.parent
BIN = Path(sys.executable).parent  # accelerate, torchrun and accel-demo of this environment


@pytest.fixture
def start():
    """`start(command, timeout=…, **environment)` runs a command to its end, with a time limit.

    Gives returncode, stdout, stderr. Fails the test where the time runs out, or where a process of
    the command is still there when the command itself has ended.
    """
    return run_to_end


def run_to_end(command, timeout=120, cwd=REPOSITORY, **environment) -> SimpleNamespace:
    program, *arguments = map(str, command)
    known = {"python": sys.executable}
    program = known.get(program, str(BIN / program) if (BIN / program).exists() else program)
    mark = uuid.uuid4().hex  # inherited by every process that the command starts
    quiet = {"GLOO_SOCKET_IFNAME": LOOPBACK, "ACCEL_DEMO_TEST": mark}
    environment = {**os.environ, **quiet, **environment}
    process = subprocess.Popen(
        [program, *arguments],
        cwd=cwd,
        env={name: value for name, value in environment.items() if value is not None},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill(marked(mark))
        stdout, stderr = process.communicate()
        pytest.fail(f"{command} took more than {timeout} s\n{stdout}\n{stderr}")
    _, orphans = psutil.wait_procs(marked(mark), timeout=5)
    kill(orphans)
    assert not orphans, f"{command} left {orphans} behind\n{stdout}\n{stderr}"
    return SimpleNamespace(returncode=process.returncode, stdout=stdout, stderr=stderr)


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def marked(mark: str) -> list[psutil.Process]:
    """The processes that run under this mark. (A process that is ending has no environment.)"""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("ACCEL_DEMO_TEST") == mark:
                found.append(process)
    return found


@pytest.fixture
def train(tmp_path):
    """`train(file, *flags, processes=N)` trains to the end in a folder of its own, and gives it.

    It asserts that as many connected processes trained as were asked for.
    """

    def train(file: str, *flags, processes: int = 1, name: str | None = None):
        run_dir = tmp_path / (name or f"{Path(file).stem}-{processes}")
        command = [*launcher(file, processes), f"accel_demo/{file}", *flags, "--run-dir", run_dir]
        result = run_to_end(command)
        assert result.returncode == 0, result.stdout + result.stderr
        found = json.loads((run_dir / "environment.json").read_text())
        assert (found["processes"], found["device"]) == (processes, "cpu")
        assert found["backend"].endswith("gloo") == (processes > 1 or file == "train_ddp.py")
        return run_dir

    return train


@pytest.fixture(scope="session")
def together(tmp_path_factory):
    """`together(function, N, **arguments)` calls a function of a test module in N processes.

    It gives what each has returned, by rank, and asserts that the N were connected. Arguments and
    results are what `torch.save` can write. Whatever a process raises fails the test.
    """

    def together(function, processes: int, timeout=120, environment=None, **arguments) -> list:
        folder = tmp_path_factory.mktemp("together")
        torch.save(arguments, folder / "arguments.pt")
        target = f"{Path(inspect.getfile(function)).stem}:{function.__name__}"
        command = ["python", REPOSITORY / "tests" / "together.py", target, processes, folder]
        result = run_to_end(command, timeout, **(environment or {}))
        assert result.returncode == 0, result.stdout + result.stderr
        assert f"{processes} connected process" in result.stdout
        files = [folder / f"{rank}.pt" for rank in range(processes)]
        return [torch.load(file, weights_only=False) for file in files]

    return together


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    """A running Chromium, the one of the system, with a new and empty profile."""
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
    """`open_page(file, width=1280)` opens an HTML file, and gives playwright's page.

    Afterwards the test fails where anything was asked for that is not in the file, or where the
    page has written to the browser's console, or raised an error.
    """
    pages, said = [], []

    def open_page(file: Path, width: int = 1280, height: int = 900):
        page, own = chromium.new_page(), Path(file).resolve().as_uri()
        pages.append(page)

        def only_own(route):
            if route.request.url == own:
                route.continue_()
            else:
                said.append(f"asked for {route.request.url}")
                route.abort()

        page.route("**/*", only_own)
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.set_viewport_size({"width": width, "height": height})
        page.goto(own)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert said == []


def launcher(file: str, processes: int) -> list[str]:
    """How a user starts a train file in that many processes."""
    if file == "train.py":
        config = {1: "cpu.yaml", 2: "cpu_two_processes.yaml"}[processes]
        return ["accelerate", "launch", "--config_file", f"accelerate_configs/{config}"]
    if file == "train_ddp.py":
        return ["torchrun", "--standalone", "--nproc-per-node", str(processes)]
    assert processes == 1, f"{file} is one process"
    return ["python"]
