"""Test that stopped runs save a checkpoint, dead ranks are reported, and no process is orphaned."""

import json
import os
import re
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from accel_demo.processes.cleanup import kill_all
from tests.conftest import (
    REPOSITORY,
    launcher,
    left_behind,
    processes_below_this_one,
    rank_environments,
    run_training,
    start_process,
)
from tests.core.test_resume import train_lines

# Long enough to be interrupted: 192 steps on one process, 96 steps on two.
LONG = "--train-samples 1536 --test-samples 100 --batch-size 32 --epochs 4 --dropout 0.2 --augment"
LONG = [*LONG.split(), "--log-every", "1", "--checkpoint-every", "7"]

BOTH = ["train.py", pytest.param("train_ddp.py", marks=pytest.mark.slow)]


def same_weights(first: Path, second: Path) -> bool:
    weights, others = (load_file(run / "model.safetensors") for run in (first, second))
    return all(torch.equal(weights[name], others[name]) for name in weights | others)


class Launch:
    """A training run in its own folder. Tests can send signals to its processes.

    If `ranks` is set, the command is started once per rank, without a launcher. The TCP store is
    hosted by the test's process, or by rank 0 if `keeps_store` is set. By default, launchers and
    their workers start normally. If `real` is False, they are forked from the fork server. Without
    `ranks`, `variables` are added to the environment.
    """

    def __init__(
        self,
        command: list,
        run: Path,
        ranks=None,
        ignored=None,
        real=None,
        keeps_store=False,
        **variables,
    ):
        self.run, self.before, self.stack = run, processes_below_this_one(), ExitStack()
        self.output = self.stack.enter_context(open(run.with_suffix(".txt"), "a+"))
        environments: list[dict] = [variables]
        if ranks:
            environments = self.stack.enter_context(rank_environments(ranks, keeps_store))
        self.processes = [
            start_process(
                [*command, "--run-dir", run],
                self.output,
                self.output,
                real=command[0] != "python" if real is None else real,
                new_session=True,
                ignored_signal=ignored,
                **environment,
            )
            for environment in environments
        ]
        self.process = self.processes[0]

    def reach(self, step: int) -> None:
        deadline = time.monotonic() + 100
        while not [line for line in train_lines(self.run) if line["step"] >= step]:
            assert time.monotonic() < deadline and self.process.poll() is None, self.printed()
            time.sleep(0.01)

    def pid_of(self, rank: int) -> int:
        """Return the process id of a rank. Loader workers have the same RANK, but start later."""
        if len(self.processes) > 1:
            return self.processes[rank].pid
        for process in psutil.Process(self.process.pid).children(recursive=True):
            if process.environ().get("RANK") == str(rank):
                return process.pid
        raise AssertionError(f"no rank {rank}")

    def end(self, timeout: float = 100) -> int:
        """Wait for the run to end, check for orphans, and return the largest exit code."""
        try:
            codes = [process.wait(timeout) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(self.where_it_hangs()) from None
        orphans = left_behind(self.before)
        assert not orphans, (orphans, self.printed())
        return max(codes)

    def where_it_hangs(self) -> str:
        """Return the output, including the Python stack of each process that is still running."""
        running = sorted(processes_below_this_one() - self.before, key=lambda process: process.pid)
        for process in running:
            self.output.write(f"\n{process}\n")
            self.output.flush()
            process.send_signal(signal.SIGUSR2)  # makes a forked program print its stack
            time.sleep(1)
        return self.printed()

    def printed(self) -> str:
        self.output.seek(0)
        return self.output.read()


@pytest.fixture
def launch(tmp_path):
    """`launch(command, name)` starts a training run, whose processes are killed after the test."""
    launches = []

    def launch(command: list, name: str, **options) -> Launch:
        launches.append(Launch(command, tmp_path / name, **options))
        return launches[-1]

    yield launch
    for started in launches:
        kill_all(processes_below_this_one() - started.before)
        for process in started.processes:
            process.wait(10)
        started.stack.close()


def command_of(file: str, processes: int, *flags) -> list:
    return [*launcher(file, processes), f"accel_demo/{file}", *LONG, *flags]


def resume(run: Path, file: str, processes: int) -> str:
    """Resume the run, wait until it is complete, and return the output."""
    arguments = [*LONG, "--resume", "auto", "--run-dir", run]
    result = run_training(f"accel_demo/{file}", arguments, processes)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """`uninterrupted(file, processes)` trains without interruption, and returns the run folder."""
    runs = {}

    def uninterrupted(file: str, processes: int) -> Path:
        if (file, processes) not in runs:
            run = tmp_path_factory.mktemp("uninterrupted") / "run"
            arguments = [*LONG, "--run-dir", run]
            result = run_training(f"accel_demo/{file}", arguments, processes)
            assert result.returncode == 0, result.stderr
            environment = json.loads((run / "environment.json").read_text())
            assert environment["processes"] == processes
            runs[file, processes] = run
        return runs[file, processes]

    return uninterrupted


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, signal.SIGINT, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)],
)
def test_a_signal_makes_a_run_save_and_print_the_command_that_continues_it(
    number, launch, uninterrupted
):
    command = ["python", "accel_demo/train_plain.py", *LONG, "--num-workers", 2]
    started = launch(command, "run")
    started.reach(20)
    os.killpg(started.process.pid, number)  # signals the loader workers, too, like Ctrl-C
    assert started.end() == 0, started.printed()
    last = train_lines(started.run)[-1]["step"]
    (stop,) = re.findall("stopped after step (\\d+); to continue: (.*)", started.printed())
    assert int(stop[0]) == last < 96
    assert not (started.run / "summary.json").exists()
    words = stop[1].split()
    assert words[:2] == ["python", "accel_demo/train_plain.py"] and words[-2:] == [
        "--resume",
        "auto",
    ]
    assert words.count("--run-dir") == 1
    resumed = launch([*words[: words.index("--run-dir")], "--resume", "auto"], "run")
    assert resumed.end() == 0, resumed.printed()
    assert f"after step {last}" in resumed.printed()
    assert same_weights(resumed.run, uninterrupted("train_plain.py", 1))


@pytest.mark.parametrize("file", BOTH)
def test_if_one_process_gets_a_signal_all_stop_after_the_same_step(file, launch, uninterrupted):
    started = launch(command_of(file, 2), "run")
    started.reach(10)
    os.kill(started.pid_of(1), signal.SIGUSR1)
    assert started.end() == 0, started.printed()
    assert "2 processes on cpu" in started.printed()
    (stop,) = re.findall("stopped after step (\\d+); to continue: (.*)", started.printed())
    assert int(stop[0]) == train_lines(started.run)[-1]["step"] < 48
    assert stop[1].startswith(" ".join(launcher(file, 2)))
    assert "2 processes on cpu" in resume(started.run, file, 2)
    assert same_weights(started.run, uninterrupted(file, 2))


@pytest.mark.parametrize("file", BOTH)
def test_usr1_ends_the_launch_without_an_error_if_the_launcher_ignores_it(file, launch):
    """All processes get USR1, and the launcher ignores it, as after `trap '' USR1` in a shell."""
    started = launch(command_of(file, 2), "run", ignored=signal.SIGUSR1)
    started.reach(10)
    for process in processes_below_this_one() - started.before:
        process.send_signal(signal.SIGUSR1)
    assert started.end() == 0, started.printed()
    assert started.printed().count("stopped after step") == 1
    assert "2 processes on cpu" in started.printed()


@pytest.mark.parametrize("file", BOTH)
def test_a_launcher_that_handles_slurms_signal_passes_it_on_and_fails(file, launch):
    """Only the launcher gets the signal. Without the setting, it would just die."""
    command, variables, handled = command_of(file, 2), {}, "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    if file == "train_ddp.py":
        command[1:1] = ["--signals-to-handle", handled]
    else:
        variables["PET_SIGNALS_TO_HANDLE"] = handled
    started = launch(command, "run", **variables)
    started.reach(10)
    os.kill(started.process.pid, signal.SIGUSR1)
    assert started.end() == 1, started.printed()
    assert started.printed().count("stopped after step") == 1
    assert "2 processes on cpu" in started.printed()
    assert f"got signal: {signal.SIGUSR1}" in started.printed()


def test_loader_workers_run_until_the_step_ends(launch):
    """All child processes get the signal, including those that only start loader workers."""
    command = [*command_of("train_ddp.py", 2), "--num-workers", 1]
    started = launch([*command, "--batch-size", 4, "--accumulate", 64], "run")
    started.reach(4)
    for process in psutil.Process(started.process.pid).children(recursive=True):
        process.send_signal(signal.SIGTERM)
    assert started.end() == 0, started.printed()
    assert "2 processes on cpu" in started.printed()
    assert started.printed().count("stopped after step") == 1


def test_spawn_passes_a_signal_on_to_its_processes(launch):
    command = ["python", "accel_demo/train_ddp.py", "--nproc", 2, *LONG]
    started = launch(command, "run", real=True)
    started.reach(10)
    os.kill(started.process.pid, signal.SIGTERM)
    assert started.end() == 0, started.printed()
    assert "2 processes on cpu" in started.printed()
    (command,) = re.findall("to continue: (.*)", started.printed())
    assert command.startswith("python accel_demo/train_ddp.py --nproc 2")


@pytest.mark.parametrize("file", BOTH)
def test_a_killed_worker_is_restarted_and_the_run_ends_with_the_same_weights(
    file, launch, uninterrupted
):
    command = command_of(file, 2, "--resume", "auto")
    flag = "--max_restarts" if file == "train.py" else "--max-restarts"
    command[-len(LONG) - 3 : -len(LONG) - 3] = [flag, "4"]
    started = launch(command, "run", real=False)
    for rank, step in ((1, 10), (0, 20), (1, 30)):  # of 96 steps; a step may take as little as 5 ms
        started.reach(step)
        os.kill(started.pid_of(rank), signal.SIGKILL)
        time.sleep(1)  # gives the launcher time to notice
    assert started.end() == 0, started.printed()
    assert "Connection refused" not in started.printed()
    assert started.printed().count("resumed from") == 3
    assert same_weights(started.run, uninterrupted(file, 2))


RESTARTED_TWICE = """
import os
import time
import torch.distributed as dist

dist.init_process_group("gloo")
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print(f"start {restarts}: connected {dist.get_world_size()} processes\\n", end="", flush=True)
if restarts < 2:
    time.sleep(1)  # so that the other rank prints, too
    os.kill(os.getpid(), 9)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("file", BOTH)
def test_with_a_new_store_for_each_start_a_script_can_restart_without_our_workaround(
    file, start, tmp_path
):
    program = tmp_path / "restarted_twice.py"
    program.write_text(RESTARTED_TWICE)
    flags = ["--max-restarts", "2"]
    if file == "train.py":
        flags = ["--max_restarts", "2", "--rdzv_backend", "c10d"]
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    result = start([*launcher(file, 2), *flags, program], real=True, **variables)
    assert result.returncode == 0, result.stderr
    for restarts in range(3):
        assert result.stdout.count(f"start {restarts}: connected 2 processes") == 2
    assert "Connection refused" not in result.stderr


@pytest.mark.parametrize(
    ("rank", "start"), [(0, "alone"), (1, "alone"), (1, "rank 0 hosts the store"), (1, "torchrun")]
)
def test_a_remaining_rank_reports_which_rank_has_died(rank, start, launch):
    """Under torchrun, the other ranks also get SIGTERM as soon as torchrun notices the death."""
    if start == "torchrun":
        started = launch(command_of("train_ddp.py", 3), "run", real=False)
    else:
        command = ["python", "accel_demo/train_ddp.py", *LONG]
        started = launch(command, "run", ranks=3, keeps_store=start != "alone")
    started.reach(5)
    os.kill(started.pid_of(rank), signal.SIGKILL)
    assert started.end() != 0
    lines = [line for line in started.printed().splitlines() if line.startswith("error: ")]
    assert "3 processes on cpu" in started.printed()
    assert len(lines) == 1 and f"rank {rank} has died; rank {1 - rank} noticed" in lines[0]


def test_a_hanging_rank_is_reported_after_the_timeout(launch):
    command = ["python", "accel_demo/train_ddp.py", *LONG, "--collective-timeout", "3"]
    started = launch(command, "run", ranks=3)
    started.reach(5)
    pid, stopped_at = started.pid_of(1), time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    try:
        while "error: " not in started.printed():
            assert time.monotonic() - stopped_at < 30, started.printed()
            time.sleep(0.2)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert started.end() != 0
    lines = [line for line in started.printed().splitlines() if line.startswith("error: ")]
    assert "3 processes on cpu" in started.printed()
    assert len(lines) == 1
    assert "rank 1 has not answered within --collective-timeout" in lines[0]
    place = re.search("rank 0 noticed this at `(.*)`", lines[0])[1]
    assert place in (REPOSITORY / "accel_demo" / "train_ddp.py").read_text()
