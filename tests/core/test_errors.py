"""One process speaks, and the exit code is 2."""

import pytest
import torch

from accel_demo.errors import UserError, one_line_errors
from accel_demo.processes.connect import check_processes, use_cpu
from accel_demo.processes.environment import is_launched
from accel_demo.processes.launch import spawn


@pytest.mark.parametrize(("rank", "waited"), [(0, []), (1, [20])])
def test_rank_0_speaks_at_once_and_the_others_only_if_nobody_stops_them(
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
        (
            {"RANK": "0", "WORLD_SIZE": "1"},
            "RANK is set, but not LOCAL_RANK, LOCAL_WORLD_SIZE, MAST",
        ),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT must be a whole number, got 'abc'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT must be from 0 to 65535, got 70000"),
        ({"MASTER_PORT": "-1"}, "MASTER_PORT must be from 0 to 65535, got -1"),
    ],
)
def test_odd_launch_variables_are_one_sentence(variables, message, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        assert not is_launched()
        spawn(print, 1)


def test_an_error_of_ours_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError), one_line_errors():
        raise ZeroDivisionError("a bug")


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_a_process_that_finds_itself_alone_stops(variable, monkeypatch):
    monkeypatch.setenv(variable, "2")
    with pytest.raises(UserError, match="the launcher started 2 processes, but"):
        check_processes(1, torch.device("cpu"), "no")
    check_processes(2, torch.device("cpu"), "no")


@pytest.mark.parametrize(
    ("accelerators", "processes", "cpu"), [(0, 1, True), (1, 1, False), (1, 2, True), (2, 2, False)]
)
def test_each_process_has_an_accelerator_or_none_has(accelerators, processes, cpu, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: accelerators)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert use_cpu() is cpu
