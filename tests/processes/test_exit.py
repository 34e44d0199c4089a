"""Test that the threads of a process group end before Python shuts down.

If a gloo thread needs the GIL while Python shuts down, the process aborts:
https://github.com/pytorch/pytorch/pull/179291
"""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from accel_demo.processes.connect import connect
from accel_demo.processes.launch import spawn
from tests.conftest import launcher
from tests.processes.at_exit import watch

FLAGS = "--model tiny_cnn --dataset synthetic --train-samples 64 --test-samples 20 --batch-size 4"
FLAGS = [*FLAGS.split(), "--max-steps", "3", "--run-dir"]
SHORT_PROGRAMS = [
    "tutorials/10_where_am_i.py",
    "tutorials/11_accelerate.py",
    "tutorials/11_ddp.py",
    "tutorials/23_accumulation.py",
    "tutorials/31_batch_and_learning_rate.py",
    "tutorials/33_precision_and_compilation.py",
    "tutorials/34_kill_and_resume.py",
    "accel_demo/lab/doctor/probe.py",
]
THREADS = ["gloo_tcp_loop", "pt_gloo_runloop", "pt_gloo_runloop"]  # while a process group exists


def check_threads(folder: Path, ranks: tuple[int, ...] = (0, 1)) -> None:
    for rank in ranks:
        record = json.loads((folder / f"{rank}.json").read_text())
        assert record["processes"] == 2
        assert record["connected"] == THREADS
        assert record["at exit"] == [], f"rank {rank}"


def run_watched(start, launch: list[str], folder: Path, program: str, *flags, **environment):
    """Launch a program as a user would, but through tests/processes/at_exit.py.

    The program is not forked from the fork server, because a forked program exits without
    finalizing the interpreter.
    """
    command = [*launch, "tests/processes/at_exit.py", folder, program, *flags]
    return start(command, real=True, **environment)


@pytest.mark.parametrize("file", ["train.py", "train_ddp.py"])
def test_no_thread_of_the_group_outlives_a_training_run(file, start, tmp_path):
    program = [f"accel_demo/{file}", *FLAGS, tmp_path / "run"]
    result = run_watched(start, launcher(file, 2), tmp_path, *program)
    assert result.returncode == 0, result.stdout + result.stderr
    check_threads(tmp_path)


def train_in_a_cycle(device: torch.device) -> None:
    model = DistributedDataParallel(torch.nn.Linear(3, 1).to(device))
    model(torch.ones(2, 3, device=device)).sum().backward()
    cycle = [model]  # only the garbage collector can free it
    cycle.append(cycle)


def test_a_model_in_a_reference_cycle_does_not_keep_the_threads_of_its_group_alive(start, tmp_path):
    torch.save({}, tmp_path / "arguments.pt")
    program = ["tests/together.py", f"{__name__}:train_in_a_cycle", 2, tmp_path]
    result = run_watched(start, launcher("train_ddp.py", 2), tmp_path, *program)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith("2 connected processes")
    check_threads(tmp_path)


def connect_and_train(folder: Path) -> None:
    watch(folder)
    train_in_a_cycle(connect(60))
    dist.destroy_process_group()


def start_two(folder: str) -> None:
    """Spawn two processes that connect and train. The test below runs this in a new process."""
    spawn(connect_and_train, 2, Path(folder))


def test_no_thread_of_the_group_outlives_a_spawned_process(start, tmp_path):
    """The start method is "spawn", because a forked process does not finalize the interpreter."""
    call = f"from {__name__} import start_two; start_two({str(tmp_path)!r})"
    result = start(["python", "-c", call], real=True, ACCEL_DEMO_START_METHOD="spawn")
    assert result.returncode == 0, result.stdout + result.stderr
    check_threads(tmp_path)


@pytest.mark.slow
def test_no_thread_of_the_group_outlives_a_run_that_is_refused(start, tmp_path):
    program = ["accel_demo/train_ddp.py", *FLAGS, tmp_path / "run", "--resume", tmp_path]
    result = run_watched(start, launcher("train_ddp.py", 2), tmp_path, *program)
    assert "is not a checkpoint" in result.stderr and "exitcode: 2" in result.stderr
    check_threads(tmp_path, ranks=(0,))  # the launcher stops rank 1 after rank 0 has failed


@pytest.mark.slow
@pytest.mark.parametrize("program", SHORT_PROGRAMS)
def test_no_thread_of_the_group_outlives_a_short_program(program, start, tmp_path):
    environment = {"ACCELERATE_USE_CPU": "true"}  # connects a plain Accelerator() without GPUs
    result = run_watched(start, launcher("train.py", 2), tmp_path, program, **environment)
    assert result.returncode == 0, result.stdout + result.stderr
    check_threads(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["train.py", "train_ddp.py"])
def test_a_slow_thread_does_not_abort_a_training_run(file, start, tmp_path):
    """A gloo thread takes 3 s to release a tensor. Rank 1 would abort if it did not wait."""
    program = [f"accel_demo/{file}", *FLAGS, tmp_path / "run"]
    result = run_watched(start, launcher(file, 2), tmp_path, *program, SLOW_RELEASE="3")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "terminate called" not in result.stderr
    check_threads(tmp_path)
