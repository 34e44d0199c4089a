"""Test that stopped runs save a checkpoint, dead ranks are reported, and no process is orphaned."""

import fcntl
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import termios
import time
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path

import psutil
import pytest

from accel_demo.processes.cleanup import kill_all
from accel_demo.run.manifest import MANIFEST, newest_complete
from tests.conftest import (
    BIN,
    REPOSITORY,
    launcher,
    left_behind,
    processes_below_this_one,
    rank_environments,
    run_training,
    start_process,
    train_in,
)
from tests.runs import lines_of, same_weights

# Long enough to be interrupted: 128 steps on one process, 64 steps on two.
LONG = "--train-samples 1024 --test-samples 100 --batch-size 32 --epochs 4 --dropout 0.2 --augment"
LONG = [*LONG.split(), "--log-every", "1", "--checkpoint-every", "7"]

BOTH = ["train.py", pytest.param("train_ddp.py", marks=pytest.mark.slow)]


class Launch:
    """A training run in its own folder. Tests can send signals to its processes."""

    def __init__(self, run: Path):
        self.run, self.before = run, processes_below_this_one()
        self.output = open(run.with_suffix(".txt"), "a+")
        self.processes: dict[int, subprocess.Popen] = {}  # the launcher, or the ranks

    def start(self, number: int, command: list, **options) -> None:
        command = [*command, "--run-dir", self.run]
        self.processes[number] = start_process(
            command, self.output, self.output, new_session=True, **options
        )

    def reach(self, step: int) -> None:
        self.wait_until(lambda: any(line["step"] >= step for line in lines_of(self.run)))

    def wait_until(self, is_true) -> None:
        deadline = time.monotonic() + 100
        while not is_true():
            running = all(process.poll() is None for process in self.processes.values())
            assert time.monotonic() < deadline and running, self.printed()
            time.sleep(0.01)

    def pid_of(self, rank: int) -> int:
        """Return the process id of a rank. Loader workers have the same RANK, but start later."""
        if len(self.processes) > 1:
            return self.processes[rank].pid
        for process in psutil.Process(self.processes[0].pid).children(recursive=True):
            if process.environ().get("RANK") == str(rank):
                return process.pid
        raise AssertionError(f"no rank {rank}")

    def end(self, timeout: float = 100) -> int:
        """Wait for the run to end, check for orphans, and return the largest exit code."""
        try:
            codes = [process.wait(timeout) for process in self.processes.values()]
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

    def stop_lines(self) -> list[tuple[int, str]]:
        """Return the step and the command in each line that a stopped run has printed."""
        lines = re.findall("stopped after step (\\d+); to continue: (.*)", self.printed())
        return [(int(step), command) for step, command in lines]

    def close(self) -> None:
        """Kill all processes that are left."""
        kill_all(processes_below_this_one() - self.before)
        for process in self.processes.values():
            process.wait(10)
        self.output.close()


@pytest.fixture
def launch(tmp_path):
    """`launch(command)` starts a training run, whose processes are killed after the test.

    All processes are forked from the fork server, unless `real` is set. If `ranks` is set, the
    command is started once per rank, without a launcher. The TCP store is then hosted by the test's
    process, or by rank 0 if `keeps_store` is set. Otherwise, `variables` are added to the
    environment.
    """
    launches = []
    with ExitStack() as stack:

        def launch(command, ranks=0, keeps_store=False, real=False, ignored=None, **variables):
            environments = [variables]
            if ranks:
                environments = stack.enter_context(rank_environments(ranks, keeps_store))
            launches.append(Launch(tmp_path / "run"))
            options = {"real": real, "ignored_signal": ignored}
            for number, environment in enumerate(environments):
                launches[-1].start(number, command, **options, **environment)
            return launches[-1]

        yield launch
        for started in launches:
            started.close()


def command_of(file: str, processes: int, *flags) -> list:
    return [*launcher(file, processes), f"accel_demo/{file}", *LONG, *flags]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """`uninterrupted(file, processes)` trains without interruption, and returns the run folder."""

    @cache
    def uninterrupted(file: str, processes: int) -> Path:
        run = tmp_path_factory.mktemp("uninterrupted") / "run"
        return train_in(run, file, *LONG, processes=processes)

    return uninterrupted


def test_a_signal_makes_a_run_save_and_print_the_command_that_continues_it(launch, uninterrupted):
    words = ["python", "accel_demo/train_plain.py", *LONG, "--num-workers", 1]
    steps = {signal.SIGTERM: 10, signal.SIGINT: 35, signal.SIGUSR1: 60, signal.SIGHUP: 85}
    for number, step in steps.items():
        started = launch(words)
        started.reach(step)
        os.killpg(started.processes[0].pid, number)  # signals the loader worker, too, like Ctrl-C
        assert started.end() == 0, started.printed()
        *_, (stopped_after, command) = started.stop_lines()
        assert stopped_after == lines_of(started.run, "train_loss")[-1]["step"] < 128
        assert not (started.run / "summary.json").exists()
        words = command.split()
        assert words[:2] == ["python", "accel_demo/train_plain.py"]
        assert words[-2:] == ["--resume", "auto"] and words.count("--run-dir") == 1
        words = [*words[: words.index("--run-dir")], "--resume", "auto"]
    resumed = launch(words)
    assert resumed.end() == 0, resumed.printed()
    steps = re.findall("resumed from .*, after step (\\d+)", resumed.printed())
    assert [int(step) for step in steps] == [step for step, _ in resumed.stop_lines()]
    assert len(steps) == 4 and same_weights(resumed.run, uninterrupted("train_plain.py", 1))


@pytest.mark.parametrize("file", BOTH)
def test_if_one_process_gets_a_signal_all_stop_after_the_same_step(file, launch, uninterrupted):
    started = launch(["python", f"accel_demo/{file}", *LONG], ranks=2)
    started.reach(10)
    os.kill(started.pid_of(1), signal.SIGUSR1)
    assert started.end() == 0, started.printed()
    assert "2 processes on cpu" in started.printed()
    ((step, _),) = started.stop_lines()
    assert step == lines_of(started.run, "train_loss")[-1]["step"] < 64
    arguments = [*LONG, "--resume", "auto", "--run-dir", started.run]
    result = run_training(f"accel_demo/{file}", arguments, 2)
    assert result.returncode == 0 and "2 processes on cpu" in result.stdout, result.stderr
    assert same_weights(started.run, uninterrupted(file, 2))


@pytest.mark.parametrize("file", BOTH)
def test_usr1_ends_the_launch_without_an_error_if_the_launcher_ignores_it(file, launch):
    """All processes get USR1, and the launcher ignores it, as after `trap '' USR1` in a shell."""
    started = launch(command_of(file, 2), real=True, ignored=signal.SIGUSR1)
    started.reach(10)
    for process in processes_below_this_one() - started.before:
        process.send_signal(signal.SIGUSR1)
    assert started.end() == 0, started.printed()
    ((_, command),) = started.stop_lines()
    assert command.startswith(" ".join(launcher(file, 2)))
    assert "2 processes on cpu" in started.printed()


@pytest.mark.parametrize("file", BOTH)
def test_a_launcher_that_handles_slurms_signal_passes_it_on_and_fails(file, launch):
    """Only the launcher gets the signal. Without the setting, it would just die."""
    command, variables, handled = command_of(file, 2), {}, "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    if file == "train_ddp.py":
        command[1:1] = ["--signals-to-handle", handled]
    else:
        variables["PET_SIGNALS_TO_HANDLE"] = handled
    started = launch(command, **variables)
    started.reach(10)
    os.kill(started.processes[0].pid, signal.SIGUSR1)
    assert started.end() == 1, started.printed()
    assert len(started.stop_lines()) == 1
    assert "2 processes on cpu" in started.printed()
    assert f"got signal: {signal.SIGUSR1}" in started.printed()


@pytest.mark.slow
def test_accelerate_launch_with_one_process_dies_alone_and_the_run_knows_its_command(launch):
    started = launch(command_of("train.py", 1), real=True)
    started.reach(10)
    (rank,) = psutil.Process(started.processes[0].pid).children()
    os.kill(started.processes[0].pid, signal.SIGTERM)
    assert started.processes[0].wait(10) == -signal.SIGTERM
    died_at = lines_of(started.run)[-1]["step"]
    while lines_of(started.run)[-1]["step"] < died_at + 5:
        assert rank.is_running() and started.stop_lines() == []
        time.sleep(0.01)
    rank.terminate()
    rank.wait(60)
    ((_, command),) = started.stop_lines()
    assert command.startswith(" ".join(launcher("train.py", 1)))
    assert "1 process on cpu" in started.printed()


WITHOUT_SIGHUP = ["--signals-to-handle", "SIGTERM,SIGINT,SIGQUIT"]


@pytest.mark.parametrize(
    "flags",
    [
        None,
        pytest.param([], marks=pytest.mark.slow),
        pytest.param(WITHOUT_SIGHUP, marks=pytest.mark.slow),
    ],
    ids=["python", "torchrun", "flag"],
)
def test_nohup_keeps_a_run_alive_unless_torchrun_handles_sighup(flags, launch):
    """If SIGHUP is ignored at the start, it remains ignored. But torchrun catches it by default."""
    command = command_of("train_ddp.py", 2)
    command[1:1] = flags or []
    if flags is None:
        command = ["python", "accel_demo/train_plain.py", *LONG]
    started = launch(command, ignored=signal.SIGHUP)
    started.reach(10)
    hung_up_after = lines_of(started.run)[-1]["step"]
    for process in processes_below_this_one() - started.before:
        process.send_signal(signal.SIGHUP)
    if flags != []:
        started.reach(hung_up_after + 5)
        assert started.stop_lines() == []
        os.kill(started.processes[0].pid, signal.SIGTERM)
    assert started.end() == (0 if flags is None else 1), started.printed()
    assert len(started.stop_lines()) == 1
    assert f"{1 if flags is None else 2} process" in started.printed()


def train_in_terminal_and_close_it(command: str, run: Path) -> None:
    """Type a command in a new terminal, close the terminal after step 10, and wait for the end."""
    before = processes_below_this_one()
    terminal, end_of_shell = pty.openpty()
    os.set_blocking(terminal, False)
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=end_of_shell,
        stdout=end_of_shell,
        stderr=end_of_shell,
        cwd=REPOSITORY,
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(end_of_shell)
    os.write(terminal, f"{command}\n".encode())
    try:
        printed, deadline = b"", time.monotonic() + 100
        while not any(line["step"] >= 10 for line in lines_of(run)):
            with suppress(BlockingIOError):
                printed += os.read(terminal, 100_000)  # or the run would have to wait
            assert time.monotonic() < deadline, printed.decode()
            time.sleep(0.01)
        os.close(terminal)
        assert shell.wait(30) == -signal.SIGHUP
        started = processes_below_this_one() - before
        _, remaining = psutil.wait_procs(started, timeout=60)
        assert not remaining
    finally:
        kill_all(processes_below_this_one() - before)
        shell.wait(10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "processes", "command"),
    [
        ("train_plain.py", 1, "python FILE FLAGS"),
        ("train.py", 1, None),
        ("train.py", 2, None),
        ("train_ddp.py", 2, None),
        ("train_ddp.py", 2, "python FILE --nproc 2 FLAGS 2>&1 | tee LOG"),
    ],
)
def test_a_run_saves_if_its_terminal_is_closed(file, processes, command, uninterrupted, tmp_path):
    """Writing to the closed terminal raises an error, which must not interrupt the save."""
    run, file_path = tmp_path / "run", f"accel_demo/{file}"
    command = command or shlex.join([*launcher(file, processes), "FILE", "FLAGS"])
    flags = shlex.join([*LONG, "--num-workers", "1", "--run-dir", str(run)])
    for name, text in (("FILE", file_path), ("FLAGS", flags), ("LOG", f"{run}.log")):
        command = command.replace(name, text)
    train_in_terminal_and_close_it(command, run)
    last_step = lines_of(run, "train_loss")[-1]["step"]
    assert last_step < 128 // processes
    newest, _ = newest_complete(run)
    assert newest and json.loads((newest / MANIFEST).read_text())["step"] == last_step
    result = run_training(file_path, [*LONG, "--run-dir", run, "--resume", "auto"], processes)
    assert result.returncode == 0, result.stderr
    assert json.loads((run / "environment.json").read_text())["processes"] == processes
    assert same_weights(run, uninterrupted(file, processes))


@pytest.mark.slow
def test_a_run_that_ignores_sighup_continues_after_its_terminal_is_closed(uninterrupted, tmp_path):
    run = tmp_path / "run"
    words = ["python", "accel_demo/train_plain.py", *LONG, "--run-dir", str(run)]
    train_in_terminal_and_close_it(f"(trap '' HUP; {shlex.join(words)})", run)
    assert (run / "summary.json").exists()
    assert same_weights(run, uninterrupted("train_plain.py", 1))


def test_loader_workers_run_until_the_step_ends(launch):
    """All processes get the signal, including those that only start loader workers.

    The processes start normally, because a forked process does not inherit blocked signals.
    """
    flags = ["--num-workers", 1, "--batch-size", 4, "--accumulate", 32]
    started = launch(["python", "accel_demo/train_ddp.py", *LONG, *flags], ranks=1, real=True)
    started.reach(2)
    processes = processes_below_this_one() - started.before
    assert len(processes) > 2  # the rank, its loader worker, and the server that starts workers
    for process in processes:
        process.send_signal(signal.SIGTERM)
    assert started.end() == 0, started.printed()
    assert "1 process on cpu (DistributedDataParallel, gloo)" in started.printed()
    assert len(started.stop_lines()) == 1


@pytest.mark.parametrize(
    ("send", "number"),
    [
        (os.kill, signal.SIGTERM),
        pytest.param(os.killpg, signal.SIGHUP, marks=pytest.mark.slow),  # also to its server
    ],
)
def test_spawn_passes_a_signal_on_to_its_processes(send, number, launch):
    command = ["python", "accel_demo/train_ddp.py", "--nproc", 2, *LONG]
    started = launch(command, real=True)
    started.reach(10)
    send(started.processes[0].pid, number)
    assert started.end() == 0, started.printed()
    assert "2 processes on cpu" in started.printed()
    ((_, command),) = started.stop_lines()
    assert command.startswith("python accel_demo/train_ddp.py --nproc 2")


@pytest.mark.parametrize("file", BOTH)
def test_a_killed_worker_is_restarted_and_the_run_ends_with_the_same_weights(
    file, launch, uninterrupted
):
    command = command_of(file, 2, "--resume", "auto")
    flag = "--max_restarts" if file == "train.py" else "--max-restarts"
    command[-len(LONG) - 3 : -len(LONG) - 3] = [flag, "4"]
    started = launch(command)
    for restarts, (rank, step) in enumerate(((1, 8), (0, 16)), 1):
        started.reach(step)
        os.kill(started.pid_of(rank), signal.SIGKILL)
        started.wait_until(lambda count=restarts: started.printed().count("resumed from") == count)
    assert started.end() == 0, started.printed()
    assert "Connection refused" not in started.printed()
    assert started.printed().count("resumed from") == 2
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
dist.barrier()  # so that no process exits before the other has connected
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
    """Under torchrun, the other ranks also get SIGTERM as soon as torchrun notices the death.

    The timeout is for the rare case of the next test.
    """
    options = [*LONG, "--collective-timeout", "20"]
    if start == "torchrun":
        started = launch(command_of("train_ddp.py", 3, *options))
    else:
        command = ["python", "accel_demo/train_ddp.py", *options]
        started = launch(command, ranks=3, keeps_store=start != "alone")
    started.reach(5)
    os.kill(started.pid_of(rank), signal.SIGKILL)
    assert started.end() != 0
    lines = [line for line in started.printed().splitlines() if line.startswith("error: ")]
    assert "3 processes on cpu" in started.printed()
    assert len(lines) == 1 and f"rank {rank} has died; rank {1 - rank} noticed" in lines[0]


DIES_WHILE_RECEIVING = """
import os
import signal
import time
import torch
import torch.distributed as dist
from accel_demo.processes.connect import connect, gather_objects
from accel_demo.processes.lost_processes import report_lost_processes


def main():
    connect(timeout=4)
    processes = gather_objects(os.getpid())
    print(f"connected {len(processes)} processes")
    message = torch.zeros(2**24)  # does not fit into the buffers of a connection
    if dist.get_rank() == 0:
        time.sleep(1)  # until rank 1 is waiting for the message
        os.kill(processes[1], signal.SIGSTOP)
        broadcast = dist.broadcast(message, src=0, async_op=True)
        time.sleep(1)
        os.kill(processes[1], signal.SIGKILL)
        broadcast.wait()
    else:
        dist.broadcast(message, src=0)


with report_lost_processes():
    main()
"""


def test_a_rank_that_dies_while_it_receives_is_not_reported_as_stuck(launch, tmp_path):
    """gloo then waits until the timeout, although the connection is closed."""
    program = tmp_path / "dies_while_receiving.py"
    program.write_text(DIES_WHILE_RECEIVING)
    started = launch(["python", program], ranks=2)
    assert started.end() != 0
    assert started.printed().count("connected 2 processes") == 2
    assert "error: rank 1 has died; rank 0 noticed this at" in started.printed()


def test_a_hanging_rank_is_reported_after_the_timeout(launch):
    command = ["python", "accel_demo/train_ddp.py", *LONG, "--collective-timeout", "3"]
    started = launch(command, ranks=3)
    started.reach(5)
    pid, stopped_at = started.pid_of(1), time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    try:
        while "error: " not in started.printed():
            assert time.monotonic() - stopped_at < 30, started.printed()
            time.sleep(0.05)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert started.end() != 0
    lines = [line for line in started.printed().splitlines() if line.startswith("error: ")]
    assert "3 processes on cpu" in started.printed()
    assert len(lines) == 1
    assert "rank 1 has not answered within --collective-timeout" in lines[0]
    place = re.search("rank 0 noticed this at `(.*)`", lines[0])[1]
    assert place in (REPOSITORY / "accel_demo" / "train_ddp.py").read_text()
