"""Page 10: the processes that each launch starts and connects, and the variables it sets."""

import json

import pytest

from tests.conftest import REPOSITORY, run_ranks
from tests.pages.pages import table_rows

PAGE = "10_where_am_i.md"
TORCHRUN = "torchrun --standalone --nproc-per-node 2 …"


def test_the_page_shows_how_many_processes_each_command_starts_and_connects():
    assert table_rows(PAGE, cells=5) == [
        ["1", "`python …`", "1", "1", "1"],
        ["2", "`accelerate launch --num_processes 2 …`", "2", "1", "⚠ 1"],
        ["3", f"`{TORCHRUN}`", "2", "2", "⚠ 1"],
        ["4", f"`{TORCHRUN} --cpu`", "2", "2", "2"],
    ]


IGNORED_GROUP = """
import os, sys
import torch.distributed as dist
from accelerate import PartialState

if "without" in sys.argv:
    del os.environ["LOCAL_RANK"]
state = PartialState()
group = dist.get_world_size() if dist.is_initialized() else None
print(f"{state.backend} {group} {state.num_processes}\\n", end="")
if group:
    dist.barrier()  # so that no process exits before the other has connected
"""


@pytest.mark.parametrize(("variable", "group"), [("with", 2), ("without", None)])
def test_accelerate_creates_a_group_without_a_backend_if_local_rank_is_set_and_ignores_it(
    variable, group
):
    result = run_ranks(["-c", IGNORED_GROUP, variable, "LOCAL_RANK"], 2)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"None {group} 1\n" * 2


@pytest.mark.parametrize("script", ["accel_demo/train.py", "train.py"])
def test_a_launch_without_settings_trains_in_one_process_on_a_machine_without_gpus(
    script, start, tmp_path
):
    flags = "--model tiny_cnn --dataset synthetic --train-samples 64 --test-samples 20"
    flags = [*flags.split(), "--batch-size", "4", "--max-steps", "1", "--run-dir", tmp_path / "run"]
    folder = REPOSITORY / "accel_demo" if script == "train.py" else REPOSITORY
    result = start(["accelerate", "launch", script, *flags], cwd=folder)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("1 process on cpu")
    last = result.stdout.splitlines()[-1]
    assert last.startswith("done: test accuracy") and "1 process on cpu" in last
    assert "had defaults used instead" in result.stderr
    assert "`--num_processes` was set to a value of `0`" in result.stderr


def test_a_launch_of_one_process_sets_no_variables(start):
    launch = ["accelerate", "launch", "--num_processes", "1"]
    result = start([*launch, "tutorials/94_launchers.py", "--worker"])
    assert [json.loads(line)["set"] for line in result.stdout.splitlines()] == [[]]


@pytest.mark.parametrize(("flags", "processes"), [([], 2), (["--cpu"], 1)])
def test_a_launch_uses_the_default_config_unless_it_has_cpu(start, tmp_path, flags, processes):
    default = tmp_path / "accelerate" / "default_config.yaml"
    default.parent.mkdir()
    default.write_text((REPOSITORY / "accelerate_configs/cpu_two_processes.yaml").read_text())
    command = ["accelerate", "launch", *flags, "tutorials/94_launchers.py", "--worker"]
    result = start(command, HF_HOME=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == processes


def test_a_variable_does_not_start_a_process(start):
    result = start(["python", "tutorials/10_where_am_i.py"], WORLD_SIZE="2")
    assert "WORLD_SIZE=2 | process 0 of 1" in result.stdout


@pytest.mark.parametrize("processes", [1, 3])
def test_the_same_script_runs_in_one_or_several_processes(start, processes):
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", processes]
    result = start([*torchrun, "tutorials/10_where_am_i.py", "--cpu"])
    assert result.returncode == 0, result.stderr
    everyone = str(list(range(processes)))
    lines = sorted(result.stdout.splitlines())
    assert [line.split(" | received ")[1] for line in lines] == [everyone] * processes
    for rank, line in enumerate(lines):
        assert line.startswith(f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE={processes} ")
        assert f"process {rank} of {processes}" in line
