"""Test launches in which a process is missing, or dies while connecting."""

import pytest

from accel_demo.errors import one_line_errors
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
from accel_demo.workarounds import fresh_rendezvous

def rendezvous_and_die(timeout):
    arguments = fresh_rendezvous(timeout)
    if os.environ["RANK"] == "1":
        os._exit(0)
    return arguments

connect.fresh_rendezvous = rendezvous_and_die
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
