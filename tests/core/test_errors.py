"""Test that rank 0 prints an error before other ranks, and that invalid launches are refused."""

import errno
import socket

import pytest
import torch

from accel_demo.errors import UserError, one_line_errors, output_may_be_closed
from accel_demo.processes.devices import use_cpu
from accel_demo.processes.environment import is_launched
from accel_demo.processes.launch import spawn
from accel_demo.processes.launch_checks import check_launch


@pytest.mark.parametrize(("rank", "waited"), [(0, []), (1, [20])])
def test_rank_0_prints_the_error_immediately_and_the_other_ranks_wait_first(
    rank, waited, monkeypatch, capsys
):
    slept = []
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr("time.sleep", slept.append)
    with pytest.raises(SystemExit) as stopped, one_line_errors():
        raise UserError("no")
    assert (stopped.value.code, slept) == (2, waited)
    assert capsys.readouterr().err == "error: no\n"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "1"}, "RANK is set, but not LOCAL_RANK, LOCAL_WORLD_SIZE, MA"),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT must be an integer, got 'abc'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT must be from 0 to 65535, got 70000"),
        ({"MASTER_PORT": "-1"}, "MASTER_PORT must be from 0 to 65535, got -1"),
    ],
)
def test_invalid_launch_variables_are_refused_in_one_sentence(variables, message, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        assert not is_launched()
        spawn(print, 1)


def test_an_occupied_port_is_refused(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(UserError, match=f"^port {taken.getsockname()[1]} is in use"):
            spawn(print, 1)


PRINTS_INTO_A_CLOSED_PIPE = """
import os, sys
from accel_demo.errors import output_may_be_closed
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, {number})
stream = (sys.stdout, sys.stderr)[{number} - 1]
for _ in range(2):
    with output_may_be_closed():
        print("lost", file=stream, flush=True)
print("read", file=(sys.stderr, sys.stdout)[{number} - 1], flush=True)
"""


@pytest.mark.parametrize("number", [1, 2])
def test_a_program_continues_without_a_closed_output(number, start):
    result = start(["python", "-c", PRINTS_INTO_A_CLOSED_PIPE.format(number=number)])
    assert (result.returncode, result.stdout + result.stderr) == (0, "read\n")


def test_other_errors_of_the_output_are_raised():
    with pytest.raises(OSError, match="No space left"), output_may_be_closed():
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError), one_line_errors():
        raise ZeroDivisionError("a bug")


@pytest.mark.parametrize(
    "variable", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"]
)
def test_a_process_that_is_not_connected_to_the_others_stops(variable, monkeypatch):
    monkeypatch.setenv(variable, "2")
    with pytest.raises(UserError, match="the launcher started 2 processes, but"):
        check_launch(1, torch.device("cpu"), "no")
    check_launch(2, torch.device("cpu"), "no")


@pytest.mark.parametrize(
    ("variable", "value", "processes"), [("SLURM_PTY_PORT", "45123", 1), ("WORLD_SIZE", "2", 2)]
)
def test_a_shell_or_a_launcher_in_several_tasks_of_srun_may_start_fewer_processes(
    variable, value, processes, monkeypatch
):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv(variable, value)
    check_launch(processes, torch.device("cpu"), "no")


@pytest.mark.parametrize(
    ("accelerators", "processes", "cpu"), [(0, 1, True), (1, 1, False), (1, 2, True), (2, 2, False)]
)
def test_all_processes_use_an_accelerator_or_all_use_the_cpu(
    accelerators, processes, cpu, monkeypatch
):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: accelerators)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert use_cpu() is cpu
