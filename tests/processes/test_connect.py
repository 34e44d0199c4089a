"""Test launches in which a process is missing, or dies while connecting."""

import pytest
import torch

from accel_demo.errors import UserError, one_line_errors
from accel_demo.processes.launch_checks import KIND_VARIABLES, check_kind, check_launch
from accel_demo.processes.lost_processes import report_lost_processes


def test_a_missing_process_is_reported_in_one_line(start, tmp_path):
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29617"}
    flags = ["--collective-timeout", 3, "--run-dir", tmp_path / "run"]
    result = start(["python", "accel_demo/train_ddp.py", *flags], **environment)
    assert result.returncode == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "the 2 processes of this launch did not all connect within 3 s" in line
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


def launched_as(kind: str) -> dict[str, str]:
    """Return the variables that `accelerate launch` sets for two processes of this kind."""
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29618", "FSDP_VERSION": "2"}
    return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"} | {
        **store,
        KIND_VARIABLES[kind]: "true",
    }


@pytest.mark.parametrize("kind", KIND_VARIABLES)
@pytest.mark.parametrize("file", ["train.py", "train_ddp.py"])
def test_a_kind_that_would_silently_become_ddp_is_refused(start, tmp_path, kind, file):
    flags = ["--collective-timeout", 10, "--run-dir", tmp_path / "run"]
    result = start(["python", f"accel_demo/{file}", *flags], **launched_as(kind))
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    name = "FSDP2" if kind == "FSDP" else kind
    assert line.startswith(f"error: {name} needs a GPU for each process: without them,")
    assert not (tmp_path / "run").exists()


def test_with_enough_gpus_only_fsdp2_is_supported_and_only_with_accelerate(monkeypatch):
    gpu = torch.device("cuda")
    for name, value in launched_as("DeepSpeed").items():
        monkeypatch.setenv(name, value)
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
