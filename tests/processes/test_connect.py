"""Test launches in which a process is missing, or dies while connecting."""

import pytest
import torch

from accel_demo import train, train_ddp
from accel_demo.config import TrainConfig
from accel_demo.errors import UserError, one_line_errors
from accel_demo.processes.environment import rank_environment
from accel_demo.processes.launch import free_port
from accel_demo.processes.launch_checks import KIND_VARIABLES, check_kind, check_launch
from accel_demo.processes.lost_processes import report_lost_processes
from tests.core.test_bad_input import one_line


def test_a_missing_process_is_reported_in_one_line(start, tmp_path):
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29617"}
    flags = ["--collective-timeout", 1, "--run-dir", tmp_path / "run"]
    result = start(["python", "accel_demo/train_ddp.py", *flags], **environment)
    assert result.returncode == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "the 2 processes of this launch did not all connect within 1 s" in line
    assert "Traceback" not in result.stderr and not (tmp_path / "run").exists()


LOSES_A_PROCESS = """
import os
from accel_demo.processes import connect
from accel_demo.errors import one_line_errors
from accel_demo.processes.lost_processes import report_lost_processes
from accel_demo.processes.rendezvous import join_rendezvous

def rendezvous_and_die(timeout):
    arguments = join_rendezvous(timeout)
    if os.environ["RANK"] == "1":
        os._exit(0)
    return arguments

connect.join_rendezvous = rendezvous_and_die
with one_line_errors(), report_lost_processes():
    connect.connect(3.0)
"""


def test_a_process_that_dies_while_connecting_is_reported_in_one_line(start, tmp_path):
    """Rank 1 dies after connecting to the launcher's store, while rank 0 waits for its address."""
    program = tmp_path / "loses_a_process.py"
    program.write_text(LOSES_A_PROCESS)
    result = start(["torchrun", "--standalone", "--nproc-per-node", 2, program])
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "the processes of this launch could not connect" in line
    assert "exitcode  : 2" in result.stderr  # rank 0's exit code in the launcher's report


@pytest.mark.parametrize("bug", [RuntimeError("CUDA error: invalid argument"), ValueError("gloo")])
def test_a_bug_while_connecting_keeps_its_traceback(bug):
    def init_process_group():
        raise bug

    with pytest.raises(type(bug), match=str(bug)):
        with one_line_errors(), report_lost_processes():
            init_process_group()


@pytest.fixture
def launch_as(monkeypatch):
    """`launch_as(kind)` sets the variables that `accelerate launch` sets for this kind."""

    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)

    def launch_as(kind: str) -> None:
        variables = {**rank_environment(0, 1, free_port()), "FSDP_VERSION": "2"}
        for name, value in {**variables, KIND_VARIABLES[kind]: "true"}.items():
            monkeypatch.setenv(name, value)

    return launch_as


@pytest.mark.parametrize("kind", KIND_VARIABLES)
@pytest.mark.parametrize("main", [train.main, train_ddp.main])
def test_a_kind_that_would_silently_become_ddp_is_refused(kind, main, launch_as, tmp_path, capsys):
    launch_as(kind)
    with pytest.raises(SystemExit) as stopped, one_line_errors():
        main(TrainConfig(run_dir=str(tmp_path / "run")))
    assert stopped.value.code == 2
    name = "FSDP2" if kind == "FSDP" else kind
    message = one_line(capsys.readouterr().err)
    assert message.startswith(f"{name} needs a GPU for each process: without them,")
    assert not (tmp_path / "run").exists()


def test_with_enough_gpus_only_fsdp2_is_supported_and_only_with_accelerate(launch_as, monkeypatch):
    gpu = torch.device("cuda")
    launch_as("DeepSpeed")
    with pytest.raises(UserError, match="DeepSpeed does not work with this project"):
        check_kind(gpu)
    monkeypatch.delenv(KIND_VARIABLES["DeepSpeed"])
    monkeypatch.setenv(KIND_VARIABLES["FSDP"], "true")
    check_kind(gpu)
    with pytest.raises(UserError, match="FSDP2 has no effect on this program"):
        check_launch(1, gpu, "no")
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(UserError, match="FSDP1 does not work with this project"):
        check_kind(gpu)
