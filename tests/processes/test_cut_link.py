"""Test what happens to a training run on two machines if the link between them is cut.

The machines are network namespaces, which `accel-demo nodes` makes and removes.
"""

import re
from pathlib import Path

import pytest

from accel_demo.lab.cables import why_not
from tests.conftest import train_in
from tests.runs import same_weights

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

FLAGS = "--dataset synthetic --train-samples 1024 --test-samples 100 --batch-size 4 --epochs 3 "
FLAGS = [*FLAGS.split(), "--print-every", "1", "--checkpoint-every", "2"]
STEP = "step 20:"  # of 192


@pytest.fixture
def on_two_nodes(start):
    """`on_two_nodes(*options, flags=…)` runs torchrun on two nodes with two processes each."""
    if reason := why_not():
        pytest.skip(f"needs two network namespaces, but {reason}")

    def on_two_nodes(*options, flags):
        command = ["accel-demo", "nodes", "--network", "namespaces", *options, "--", "torchrun"]
        return start([*command, "accel_demo/train.py", *FLAGS, *flags], timeout=250, real=True)

    return on_two_nodes


def errors_by_node(stderr: str) -> dict[str, list[str]]:
    nodes = ("node 0", "node 1")
    return {node: re.findall(rf"^{node} \| error: (.*)", stderr, re.MULTILINE) for node in nodes}


def test_a_cut_link_ends_the_run_on_both_sides_and_it_resumes_to_the_same_weights(
    on_two_nodes, tmp_path
):
    run = tmp_path / "run"
    flags = ["--run-dir", run, "--resume", "auto", "--collective-timeout", "10"]
    cut = on_two_nodes("--cut-after", STEP, flags=flags)
    printed = cut.stdout + cut.stderr
    assert cut.returncode == 1 and "4 processes on cpu" in printed, printed
    assert "killed node" not in printed
    errors = errors_by_node(cut.stderr)
    assert [len(lines) for lines in errors.values()] == [1, 1], printed
    # Rank 0 times out, or rank 1 does so first and closes its connections.
    expected = "ranks 2, 3 on node-1 have (not answered|died, or cannot).* rank . on node-0 noticed"
    assert re.match(expected, errors["node 0"][0])
    expected = "the launcher on node-0 has died, or cannot be reached; rank 2 on node-1 noticed"
    assert errors["node 1"][0].startswith(expected)
    assert all(lines[0].endswith("Continue with --resume auto.") for lines in errors.values())
    resumed = on_two_nodes(flags=flags)
    assert resumed.returncode == 0 and "resumed from" in resumed.stdout, resumed.stderr
    assert "4 processes on cpu" in resumed.stdout
    assert same_weights(run, train_in(tmp_path / "alone", "train.py", *FLAGS, processes=4))


def test_a_node_that_dies_is_named_in_one_line(on_two_nodes, tmp_path):
    """Rank 0 or rank 1 notices it first, but both are alive, so no line says that they died."""
    flags = ["--run-dir", tmp_path / "run", "--collective-timeout", "60"]
    result = on_two_nodes("--kill-after", STEP, flags=flags)
    printed = result.stdout + result.stderr
    assert result.returncode == 1 and "4 processes on cpu" in printed, printed
    errors = errors_by_node(result.stderr)
    assert len(errors["node 0"]) == 1 and not errors["node 1"], printed
    expected = "ranks 2, 3 on node-1 have died, or cannot be reached; rank . on node-0 noticed"
    assert re.match(expected, errors["node 0"][0])


def test_two_nodes_without_shared_storage_are_refused_in_one_line_that_names_them(
    on_two_nodes, tmp_path
):
    result = on_two_nodes(flags=["--run-dir", tmp_path / "storage-{node}" / "run"])
    errors = errors_by_node(result.stderr)
    assert result.returncode == 1, result.stderr
    folder = Path(tmp_path, "storage-0", "run")
    line = f"ranks 2, 3 on node-1 do not see the run folder {folder} of rank 0 on node-0. "
    line += "Choose a --run-dir on storage that all machines share."
    assert errors == {"node 0": [line], "node 1": [line]}
    assert not [path for path in tmp_path.rglob("*") if path.name not in ("storage-0", "storage-1")]
    # Only the launchers print tracebacks, because their processes have failed.
    assert result.stderr.count("Traceback") == result.stderr.count("ChildFailedError: ")
