"""Page 10: the variables that each launcher sets, and the arguments that it passes."""

import tempfile

import pytest

from tests.pages.pages import EXERCISES, load_grader, table_rows

SPAWN_MISTAKES = """
import torch.distributed as dist
import torch.multiprocessing as mp


def without_rank(processes):
    pass


def without_variables(rank):
    dist.init_process_group("gloo")


if __name__ == "__main__":
    for function, arguments in ((without_rank, (2,)), (without_variables, ()), (lambda r: r, ())):
        try:
            mp.spawn(function, args=arguments, nprocs=1)
        except Exception as error:
            print(str(error).strip().splitlines()[-1])
"""


def test_the_page_shows_what_each_launcher_sets_and_passes():
    rows = {row[0]: row[1:] for row in table_rows("10_where_am_i.md") if len(row) == 9}
    dies = "`script.py: error: unrecognized arguments: --local-rank=0`, exit code 2"
    told_nothing = ["", "`local_rank=None`"]
    assert rows == {
        "`python`": [*[""] * 6, *told_nothing],
        "`mp.spawn`": [*[""] * 6, *told_nothing],
        "`debug_launcher`": ["", "", "set", "", "set", "set", *told_nothing],
        "`torchrun`": [*["set"] * 6, *told_nothing],
        "`python -m torch.distributed.launch`": [*["set"] * 6, "`--local-rank=0`", dies],
        "`accelerate launch`": [*["set"] * 6, *told_nothing],
    }


@pytest.mark.parametrize("processes", [1, 3])
def test_the_same_script_runs_in_one_or_several_processes(start, processes):
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", processes]
    result = start([*torchrun, "tutorials/10_where_am_i.py"])
    assert result.returncode == 0, result.stderr
    everyone = str(list(range(processes)))
    lines = sorted(result.stdout.splitlines())
    assert [line.split(" | received ")[1] for line in lines] == [everyone] * processes
    for rank, line in enumerate(lines):
        assert line.startswith(f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE={processes} ")
        assert f"process {rank} of {processes}" in line


def test_mp_spawn_passes_the_rank_first_sets_no_variables_and_rejects_lambdas(start, tmp_path):
    script = tmp_path / "spawns.py"
    script.write_text(SPAWN_MISTAKES)
    result = start(["python", script], RANK=None, WORLD_SIZE=None)
    without_rank, without_variables, of_lambda = result.stdout.splitlines()
    assert without_rank == (
        "TypeError: without_rank() takes 1 positional argument but 2 were given"
    )
    assert "environment variable RANK expected, but not set" in without_variables
    assert "pickle" in of_lambda


def test_the_check_works_in_a_temporary_folder_with_a_space_in_its_name(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="a b ") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        [answer] = (EXERCISES / "answers").glob("00_*.py")
        grader = load_grader("10")
        grader.judge_launch(answer, grader.LAUNCHES[0])  # plain `python`, without a launcher
