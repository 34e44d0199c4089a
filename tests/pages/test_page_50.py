"""Page 50: its program says where a process is, in time or when it fails."""

import re

from accel_demo.lab.explain.catalog import pitfalls
from tests.conftest import run_ranks, run_to_end
from tests.pages.pages import TUTORIALS, bound_to, rows_below

WHERE = TUTORIALS / "50_where.py"


def test_a_script_that_takes_too_long_reports_its_line(tmp_path):
    script = tmp_path / "slow.py"
    script.write_text("import sys, time\nprint(sys.argv[1:])\ntime.sleep(3)\n")
    result = run_to_end(["python", WHERE, 0.5, script, "--epochs", "2"])
    assert result.returncode == 0, result.stderr
    assert "['--epochs', '2']" in result.stdout
    assert "rank ?: line 3 time.sleep(3), not connected" in result.stdout


def test_a_rank_that_fails_reports_its_line_and_its_collective(tmp_path):
    result = run_ranks([WHERE, 600, TUTORIALS / "pitfalls/crossed_broken.py"], 2, cwd=tmp_path)
    assert result.returncode == 1
    lines = [line for line in result.stdout.splitlines() if line.startswith("rank ")]
    [zero] = [line for line in lines if line.startswith("rank 0: ")]
    [one] = [line for line in lines if line.startswith("rank 1: ")]
    assert "collective 1: all_reduce" in zero and "collective 1: barrier" in one


def test_the_table_has_each_pitfall_that_hangs_and_its_ranks_are_at_different_places():
    rows = rows_below(TUTORIALS / "50_when_it_hangs.md", "what is wrong")
    hangs = [each["name"] for each in pitfalls() if each["symptom"] == "hangs"]
    assert [re.findall(r"(\w+)_broken\.py", row[0]) for row in rows] == [[name] for name in hangs]
    assert len(hangs) >= 8
    assert all(zero != one for _, zero, one in rows)


def test_ddp_crashes_if_pytorch_compares_the_calls_of_gloo():
    bound_to("torch", "50_when_it_hangs.md", "DDP crashes with it in PyTorch {version}")
    script = TUTORIALS / "pitfalls/stops_alone_fixed.py"
    result = run_ranks([script], 2, real=True, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert result.returncode != 0 and "ends after step" not in result.stdout
