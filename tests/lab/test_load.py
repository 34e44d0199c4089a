"""Test that a command notices other programs that use the processor, and not its own work."""

import subprocess
import sys

import pytest

from accel_demo.lab import load
from accel_demo.lab.load import LoadWatch, _Times


def between(monkeypatch, cores=2, **used) -> load.Load:
    """Return the load of 10 s in which so many seconds of processor time were used."""
    used = {"used": 0.0, "stolen": 0.0, "own": 0.0, "waiting": 0.0} | used
    monkeypatch.setattr(load.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(load, "_times", lambda: _Times(0.0, 0.0, 0.0, 0.0, 0.0))
    watch = LoadWatch()
    monkeypatch.setattr(load, "_times", lambda: _Times(10.0, **used))
    return watch.load()


@pytest.mark.parametrize(
    "used, is_busy",
    [
        ({"used": 0.1}, False),
        ({"used": 19.5, "own": 19.0}, False),  # all of it is our own work
        ({"used": 20.0, "own": 8.0}, True),
        ({"used": 20.0, "own": 16.0, "waiting": 9.0}, True),
        ({"used": 14.0, "own": 14.0, "stolen": 5.0}, True),
        ({"used": 30.0, "own": 10.0, "cores": 16}, False),  # there is room
        ({"used": 5.0, "own": 6.0}, False),  # the clocks of processes are coarse
    ],
)
def test_a_machine_is_busy_if_others_use_the_cores_that_a_command_needs(used, is_busy, monkeypatch):
    found = between(monkeypatch, **used)
    assert found.is_busy == is_busy and found.others >= 0
    assert bool(found.warning) == is_busy


def test_the_warning_says_who_uses_the_processor(monkeypatch):
    found = between(monkeypatch, used=20.0, own=8.0, stolen=2.0)
    assert found.warning == (
        "busy machine: other programs used 1.2 of 2 cores and the host took 0.2 away"
    )


def test_the_work_of_ended_and_running_children_is_our_own():
    burn = "import time; t = time.process_time()\nwhile time.process_time() < t + 0.4: pass\n"
    watch = LoadWatch()
    subprocess.run([sys.executable, "-c", burn], check=True)
    wait = [sys.executable, "-c", f"{burn}print(flush=True)\ninput()"]
    with subprocess.Popen(wait, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdout
        running.stdout.readline()
        found = watch.load()
        running.communicate(b"\n")
    assert found.own * found.seconds >= 0.75
