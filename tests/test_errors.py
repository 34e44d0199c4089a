"""One process speaks, and the exit code is 2."""

import pytest
import torch

from accel_demo.errors import UserError, one_line_errors
from accel_demo.processes import check_processes, use_cpu


@pytest.mark.parametrize(("rank", "said"), [(0, "error: no\n"), (1, "")])
def test_only_rank_0_speaks(rank, said, monkeypatch, capsys):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(SystemExit) as stopped, one_line_errors():
        raise UserError("no")
    assert stopped.value.code == 2
    assert capsys.readouterr().err == said


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
