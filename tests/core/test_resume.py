"""Test that a killed and resumed run produces the same results as an uninterrupted run."""

import json
import os
from pathlib import Path

import pytest

from accel_demo.wording import counted
from tests.conftest import run_training

# An epoch has 16 micro-batches on one process, or 8 on each of two processes.
FLAGS = "--dataset synthetic --train-samples 64 --test-samples 20 --batch-size 4 --epochs 3"
FLAGS = [*FLAGS.split(), "--dropout", "0.2", "--augment", "--log-every", "1"]


def train_lines(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in map(json.loads, filter(is_complete, lines)) if "train_loss" in line]


def is_complete(line: str) -> bool:
    return line.endswith("}")


def checkpoint(run: Path, name: str) -> Path:
    return run / "checkpoints" / name


@pytest.mark.parametrize(
    ("version", "processes", "points"),
    [
        pytest.param("train", 1, 1, marks=pytest.mark.slow),
        ("train", 2, 1),
        ("train_ddp", 3, 1),
        pytest.param("train_plain", 1, 2, marks=pytest.mark.slow),
        pytest.param("train_dp", 1, 2, marks=pytest.mark.slow),
        pytest.param("train", 1, 14, marks=pytest.mark.slow),
        pytest.param("train", 2, 14, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
        pytest.param("train_ddp", 3, 14, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_a_run_killed_after_any_micro_batch_ends_with_the_same_weights(
    version, processes, points, tmp_path
):
    """Combine fp32 and bf16, 0 and 2 loader workers, and windows of 1 and 3 micro-batches."""
    seed = int.from_bytes(os.urandom(2), "big")
    program = "tests/core/killed_everywhere.py"
    arguments = [version, tmp_path, seed, points]
    timeout = 230 if points < 14 else 880
    result = run_training(program, arguments, processes, timeout)
    assert result.returncode == 0, result.stdout + result.stderr
    reports = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(reports) == 8 * points
    for report in reports:
        expected = {"weights": True, "test_loss": True, "log": True, "precision": True}
        expected |= {"processes": processes, "resumed": report["saved"]}
        assert expected.items() <= report.items() and report["saved"] > 0, (seed, report)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """`recorded(processes, *flags)` runs recorded_samples.py. It returns the folder and output."""

    def recorded(processes: int, *flags):
        run = tmp_path_factory.mktemp("run") / "run"
        arguments = [*FLAGS, *flags, "--run-dir", run]
        result = run_training("tests/core/recorded_samples.py", arguments, processes)
        assert result.returncode == 0, result.stderr
        assert json.loads((run / "environment.json").read_text())["processes"] == processes
        return run, result.stdout

    return recorded


@pytest.fixture(scope="module")
def finished_runs(recorded):
    return {processes: recorded(processes, "--keep-last", 9)[0] for processes in (1, 2)}


@pytest.mark.parametrize("processes", [1, 2])
def test_resuming_with_a_different_world_size_uses_each_image_once_per_epoch(
    processes, recorded, finished_runs
):
    saved = checkpoint(finished_runs[3 - processes], "epoch-0001-batch-000000")
    run, printed = recorded(processes, "--resume", saved)
    assert f"saved with {counted(3 - processes, 'process')}, resuming with {processes}" in printed
    assert "results are no longer bitwise identical" in printed
    samples_by_rank = [json.loads(path.read_text()) for path in run.glob("samples-*.json")]
    assert len(samples_by_rank) == processes
    for epoch in ("1", "2"):
        assert sorted(sum((samples[epoch] for samples in samples_by_rank), [])) == list(range(64))
    expected = {
        line["step"]: line["learning_rate"] for line in train_lines(finished_runs[processes])
    }
    rates = {line["step"]: line["learning_rate"] for line in train_lines(run)}
    assert rates == {step: rate for step, rate in expected.items() if step in rates}
    assert min(rates) == 1 + 16 // processes and max(rates) == 3 * 16 // processes


def test_inside_an_epoch_a_different_world_size_is_refused_in_one_line(start, finished_runs):
    run = finished_runs[2]
    result = start(
        ["python", "accel_demo/train_ddp.py", "--nproc", 2, *FLAGS, "--run-dir", run.parent / "ddp"]
        + ["--checkpoint-every", 5, "--keep-last", 9]
    )
    assert result.returncode == 0, result.stderr
    inside = checkpoint(run.parent / "ddp", "epoch-0000-batch-000005")
    command = ["python", "accel_demo/train_ddp.py", "--nproc", 1, *FLAGS, "--resume", inside]
    result = start([*command, "--run-dir", run.parent / "new"])
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: ")
    assert (
        "was saved inside an epoch with 2 processes. Resume with the same number" in result.stderr
    )
