"""Test that a function runs in connected processes, and that every process's result is returned."""

import os
import signal
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from accel_demo.errors import one_line_errors
from accel_demo.processes.group import results_by_rank
from accel_demo.processes.signals import SIGNALS


def sum_over_ranks(device, add):
    total = torch.tensor(dist.get_rank() + add, device=device)
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), int(total), torch.get_num_threads()


def test_every_rank_is_connected_and_returns_a_result():
    assert results_by_rank(sum_over_ranks, 3, 10) == [(rank, 3, 33, 1) for rank in range(3)]
    assert results_by_rank(sum_over_ranks, 1, 5, threads=2) == [(0, 1, 5, 2)]


def fail_on_rank_1(device):
    if dist.get_rank() == 1:
        raise ValueError("planted")


def test_a_process_that_fails_ends_the_remaining_processes(capfd):
    with pytest.raises((SystemExit, Exception)) as raised:
        results_by_rank(fail_on_rank_1, 2)
    assert "planted" in str(raised.value) + capfd.readouterr().err


def stop_starter(device, number, starter):
    """Send a signal from rank 1 to the process that started it. All ranks ignore this signal."""
    for ignored in SIGNALS:
        signal.signal(ignored, signal.SIG_IGN)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(starter, number)
    time.sleep(600)


def stop_during_start(number):
    while not psutil.Process().children():
        time.sleep(0.01)
    os.kill(os.getpid(), number)


def run_and_be_stopped(name, moment):
    """Start two ranks. At `moment`, this process receives the signal `name`.

    A test runs this as a separate program, so that the `start` fixture can find orphans.
    """
    number = getattr(signal, name)
    if moment == "starting":
        threading.Thread(target=stop_during_start, args=[number]).start()
    if moment == "forking":  # Python ignores exceptions that are raised in fork callbacks
        os.environ["ACCEL_DEMO_START_METHOD"] = "fork"
        os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), number))
    with one_line_errors():
        results_by_rank(stop_starter, 2, number, os.getpid())


@pytest.mark.parametrize(
    ("name", "moment", "code"),
    [
        ("SIGINT", "running", 130),
        ("SIGTERM", "starting", 143),
        ("SIGTERM", "forking", 143),
        ("SIGINT", "forking", 130),
    ],
)
def test_a_signal_ends_every_process_immediately(name, moment, code, start):
    call = f"from {__name__} import run_and_be_stopped as b; b({name!r}, {moment!r})"
    result = start(["python", "-c", call])
    assert (result.returncode, result.stderr) == (code, "stopped\n")
