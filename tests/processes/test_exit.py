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
from tests.conftest import run_ranks
from tests.processes.at_exit import watch

FLAGS = "--model tiny_cnn --dataset synthetic --train-samples 64 --test-samples 20 --batch-size 4"
FLAGS = [*FLAGS.split(), "--max-steps", "3", "--run-dir"]
SHORT_PROGRAMS = [
    "tutorials/10_where_am_i.py",
    "tutorials/11_accelerate.py",
    "tutorials/11_ddp.py",
    "tutorials/12_accelerate.py",
    "tutorials/12_ddp.py",
    "tutorials/12_gather.py",
    "tutorials/13_by_hand.py",
    "tutorials/13_repaired.py",
    "tutorials/23_accumulation.py",
    "tutorials/23_two_models.py",
    "tutorials/31_batch_and_learning_rate.py",
    "tutorials/33_precision.py",
    "tutorials/34_kill_and_resume.py",
    "tutorials/37_ddp.py",
    "tutorials/40_profile.py",
    "tutorials/40_train.py",
    "tutorials/42_train.py",
    "tutorials/44_step.py",
    "accel_demo/lab/doctor/probe.py",
]
THREADS = ["gloo_tcp_loop", "pt_gloo_runloop", "pt_gloo_runloop"]  # while a process group exists


def check_threads(folder: Path, ranks: tuple[int, ...] = (0, 1)) -> None:
    for rank in ranks:
        record = json.loads((folder / f"{rank}.json").read_text())
        assert record["processes"] == 2
        assert record["connected"] == THREADS
        assert record["at exit"] == [], f"rank {rank}"


def run_watched(folder: Path, program: str, *flags, **environment):
    """Run a program in two connected processes, through tests/processes/at_exit.py.

    The processes are not forked from the fork server, because a forked program exits without
    finalizing the interpreter.
    """
    arguments = ["tests/processes/at_exit.py", folder, program, *flags]
    return run_ranks(arguments, 2, real=True, **environment)


@pytest.mark.parametrize("file", ["train.py", pytest.param("train_ddp.py", marks=pytest.mark.slow)])
def test_no_thread_of_the_group_outlives_a_training_run(file, tmp_path):
    """A gloo thread takes 3 s to release a tensor. Rank 1 would abort if it did not wait."""
    flags = [*FLAGS, tmp_path / "run"]
    result = run_watched(tmp_path, f"accel_demo/{file}", *flags, SLOW_RELEASE="3")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "terminate called" not in result.stderr
    check_threads(tmp_path)


def connect_and_train(folder: Path) -> None:
    watch(folder)
    device = connect(60)
    model = DistributedDataParallel(torch.nn.Linear(3, 1).to(device))
    model(torch.ones(2, 3, device=device)).sum().backward()
    cycle = [model]  # only the garbage collector can free it
    cycle.append(cycle)
    dist.destroy_process_group()


def start_two(folder: str) -> None:
    """Spawn two processes that connect and train. The test below runs this in a new process."""
    spawn(connect_and_train, 2, Path(folder))


def test_no_thread_of_a_spawned_process_outlives_a_model_in_a_reference_cycle(start, tmp_path):
    """The start method is "spawn", because a forked process does not finalize the interpreter."""
    call = f"from {__name__} import start_two; start_two({str(tmp_path)!r})"
    result = start(["python", "-c", call], real=True, ACCEL_DEMO_START_METHOD="spawn")
    assert result.returncode == 0, result.stdout + result.stderr
    check_threads(tmp_path)


@pytest.mark.slow
def test_no_thread_of_the_group_outlives_a_run_that_is_refused(tmp_path):
    flags = [*FLAGS, tmp_path / "run", "--resume", tmp_path]
    result = run_watched(tmp_path, "accel_demo/train_ddp.py", *flags)
    assert "is not a checkpoint" in result.stderr and result.returncode == 2
    check_threads(tmp_path, ranks=(0,))  # rank 1 is killed after rank 0 has failed


@pytest.mark.slow
@pytest.mark.parametrize("program", SHORT_PROGRAMS)
def test_no_thread_of_the_group_outlives_a_short_program(program, tmp_path):
    environment = {"ACCELERATE_USE_CPU": "true"}  # connects a plain Accelerator() without GPUs
    result = run_watched(tmp_path, program, **environment)
    assert result.returncode == 0, result.stdout + result.stderr
    check_threads(tmp_path)
