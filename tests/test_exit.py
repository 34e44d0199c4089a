"""A process ends after the threads of its process group, and so it does not abort.

A thread of gloo that needs Python's lock when Python is shutting down aborts the process:
https://github.com/pytorch/pytorch/pull/179291
"""

import json
from pathlib import Path

import pytest
import torch
from at_exit import watch
from conftest import launcher
from torch.nn.parallel import DistributedDataParallel

FLAGS = "--model tiny_cnn --dataset synthetic --train-samples 64 --test-samples 20 --batch-size 4"
FLAGS = [*FLAGS.split(), "--max-steps", "3", "--run-dir"]
THREADS = ["gloo_tcp_loop", "pt_gloo_runloop", "pt_gloo_runloop"]  # of a process that has a group


def check_threads(folder: Path, processes: int) -> None:
    for rank in range(processes):
        found = json.loads((folder / f"{rank}.json").read_text())
        assert found["processes"] == processes
        assert found["connected"] == THREADS
        assert found["at exit"] == [], f"rank {rank}"


def run_watched(start, launch: list[str], folder: Path, program: str, *flags, **environment):
    """Start a program in two processes, as a user does, but below tests/at_exit.py."""
    return start([*launch, "tests/at_exit.py", folder, program, *flags], **environment)


@pytest.mark.parametrize("file", ["train.py", "train_ddp.py"])
def test_no_thread_of_the_group_outlives_a_training(file, start, tmp_path):
    program = [f"accel_demo/{file}", *FLAGS, tmp_path / "run"]
    result = run_watched(start, launcher(file, 2), tmp_path, *program)
    assert result.returncode == 0, result.stdout + result.stderr
    check_threads(tmp_path, 2)


def train_a_step(device: torch.device, folder: str) -> None:
    watch(Path(folder))
    model = DistributedDataParallel(torch.nn.Linear(3, 1).to(device))
    model(torch.ones(2, 3, device=device)).sum().backward()
    cycle = [model]  # as Accelerate makes one; only the garbage collector frees it
    cycle.append(cycle)


def test_no_thread_of_the_group_outlives_what_run_in_group_starts(together, tmp_path):
    together(train_a_step, 2, folder=str(tmp_path))
    check_threads(tmp_path, 2)


def test_no_thread_of_the_group_outlives_run_in_group_in_a_launch(start, tmp_path):
    torchrun = launcher("train_ddp.py", 2)
    result = run_watched(start, torchrun, tmp_path, "tutorials/06_ddp.py")
    assert result.returncode == 0, result.stdout + result.stderr
    check_threads(tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["train.py", "train_ddp.py"])
def test_a_thread_that_is_late_does_not_abort_a_training(file, start, tmp_path):
    """A thread of gloo takes three seconds to release a tensor. Without a wait, rank 1 aborts."""
    program = [f"accel_demo/{file}", *FLAGS, tmp_path / "run"]
    result = run_watched(start, launcher(file, 2), tmp_path, *program, SLOW_RELEASE="3")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "terminate called" not in result.stderr
    check_threads(tmp_path, 2)
