"""A function is called in connected processes, and what each found comes back."""

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


def found_here(device, add):
    total = torch.tensor(dist.get_rank() + add, device=device)
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), int(total), torch.get_num_threads()


def test_every_rank_answers_and_all_were_connected():
    assert results_by_rank(found_here, 3, 10) == [(rank, 3, 33, 1) for rank in range(3)]
    assert results_by_rank(found_here, 1, 5, threads=2) == [(0, 1, 5, 2)]


def fail_on_rank_1(device):
    if dist.get_rank() == 1:
        raise ValueError("planted")


def test_a_process_that_fails_ends_the_others(capfd):
    with pytest.raises((SystemExit, Exception)) as raised:
        results_by_rank(fail_on_rank_1, 2)
    assert "planted" in str(raised.value) + capfd.readouterr().err


def ask_to_stop(device, number, starter):
    """Rank 1 asks the process that started it; no rank listens itself, as in a training."""
    for one in SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(starter, number)
    time.sleep(600)


def ask_while_it_starts(number):
    while not psutil.Process().children():
        time.sleep(0.01)
    os.kill(os.getpid(), number)


def be_asked_to_stop(name, moment):
    """A program of its own: `start` finds what it leaves behind."""
    number = getattr(signal, name)
    if moment == "starting":
        threading.Thread(target=ask_while_it_starts, args=[number]).start()
    with one_line_errors():
        results_by_rank(ask_to_stop, 2, number, os.getpid())


@pytest.mark.parametrize(
    ("name", "moment", "code"), [("SIGINT", "at work", 130), ("SIGTERM", "starting", 143)]
)
def test_a_signal_ends_every_process_at_once(name, moment, code, start):
    call = f"from {__name__} import be_asked_to_stop as b; b({name!r}, {moment!r})"
    result = start(["python", "-c", call])
    assert (result.returncode, result.stderr) == (code, "stopped\n")
