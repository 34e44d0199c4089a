"""Test that a killed and resumed run produces the same results as an uninterrupted run."""

import json
import os
from functools import cache
from pathlib import Path

import pytest

from accel_demo.run.resume import next_step_after
from accel_demo.wording import counted
from tests.conftest import run_training
from tests.core.recorded_samples import starts_of
from tests.runs import interrupt_after, lines_of

# An epoch has 16 micro-batches on one process, or 8 on each of two processes.
FLAGS = "--dataset synthetic --train-samples 64 --test-samples 20 --batch-size 4 --epochs 3"
LONG = [pytest.mark.slow, pytest.mark.timeout(900)]
FLAGS = [*FLAGS.split(), "--dropout", "0.2", "--augment", "--log-every", "1"]


def checkpoint(run: Path, name: str) -> Path:
    return run / "checkpoints" / name


@pytest.mark.parametrize(
    ("version", "processes", "points", "model"),
    [
        pytest.param("train", 1, 1, "small_cnn", marks=pytest.mark.slow),
        ("train", 2, 1, "small_cnn"),
        ("train", 2, 1, "tiny_gpt"),
        ("train_ddp", 3, 1, "small_cnn"),
        pytest.param("train_ddp", 3, 1, "tiny_gpt", marks=pytest.mark.slow),
        pytest.param("train_plain", 1, 2, "small_cnn", marks=pytest.mark.slow),
        pytest.param("train_dp", 1, 2, "small_cnn", marks=pytest.mark.slow),
        pytest.param("train", 1, 14, "small_cnn", marks=pytest.mark.slow),
        pytest.param("train", 2, 14, "small_cnn", marks=LONG),
        pytest.param("train_ddp", 3, 14, "small_cnn", marks=LONG),
    ],
)
def test_a_run_killed_after_any_micro_batch_ends_with_the_same_weights(
    version, processes, points, model, tmp_path
):
    """Combine fp32 and bf16, 0 and 2 loader workers, and windows of 1 and 3 micro-batches.

    Each resumed run is compared with an uninterrupted run without loader workers.
    """
    seed = int.from_bytes(os.urandom(2), "big")
    program = "tests/core/killed_everywhere.py"
    arguments = [version, tmp_path, seed, points, model]
    timeout = 230 if points < 14 else 880
    result = run_training(program, arguments, processes, timeout)
    assert result.returncode == 0, result.stdout + result.stderr
    reports = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(reports) == (4 if points == 1 else 8 * points)
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
        return run, result.stdout

    return recorded


@pytest.fixture(scope="module")
def finished_runs(recorded):
    """Return the folder of a finished run with `processes` processes. Each is trained once."""
    return cache(lambda processes: recorded(processes, "--keep-last", 99, *EVERY_5)[0])


EVERY_5 = ("--checkpoint-every", 5)


def samples_of(run: Path, epoch: int, processes: int) -> list[list[int]]:
    """Return the indices of the images that each rank read in this epoch."""
    (start,) = starts_of(run)
    assert start["processes"] == processes
    return [
        [index for number, indices in start["ranks"][rank] if number == epoch for index in indices]
        for rank in range(processes)
    ]


def learning_rates(run: Path) -> dict[int, float]:
    return {line["step"]: line["learning_rate"] for line in lines_of(run, "train_loss")}


@pytest.mark.parametrize(
    ("saved_with", "batches", "processes", "left_out"),
    [
        (1, 0, 2, 0),
        (2, 0, 1, 0),
        (1, 9, 2, 4),  # the next step of two processes starts with the eleventh batch
        (2, 7, 1, 0),
        pytest.param(2, 2, 4, 0, marks=pytest.mark.slow),
        (2, 7, 4, 8),  # no whole step is left, but the epoch still needs its evaluation
        pytest.param(4, 1, 2, 0, marks=pytest.mark.slow),
    ],
)
def test_resuming_with_a_different_world_size_uses_each_image_once_per_epoch(
    saved_with, batches, processes, left_out, recorded, finished_runs
):
    earlier = finished_runs(saved_with)
    saved = checkpoint(earlier, f"epoch-0001-batch-{batches:06}")
    run, printed = recorded(processes, "--resume", saved)
    assert f"saved with {counted(saved_with, 'process')}, resuming with {processes}" in printed
    assert "results are no longer bitwise identical" in printed
    assert ("this leaves out" in printed) == (left_out > 0)
    used = [samples[: 4 * batches] for samples in samples_of(earlier, 1, saved_with)]
    if batches * saved_with + left_out // 4 < 16:
        used += samples_of(run, 1, processes)
    else:
        assert f"this leaves out {left_out} images of epoch 2" in printed
    images = sum(used, [])
    assert len(set(images)) == len(images) == 64 - left_out and set(images) <= set(range(64))
    assert sorted(sum(samples_of(run, 2, processes), [])) == list(range(64))
    expected, rates = learning_rates(finished_runs(processes)), learning_rates(run)
    assert rates == {step: rate for step, rate in expected.items() if step in rates}
    first = 16 // processes + (batches * saved_with + left_out // 4) // processes + 1
    assert sorted(rates) == list(range(first, 3 * 16 // processes + 1))
    assert [line["epoch"] for line in lines_of(run, "test_loss")] == [2, 3]


def test_the_newest_checkpoint_is_used_whatever_the_number_of_processes(tmp_path):
    """Two processes save after batch 5 in a folder that has one from batch 5 of one process."""
    run = tmp_path / "run"
    first = ["--checkpoint-every", 21, "--keep-last", 99]
    second = ["--checkpoint-every", 13, "--keep-last", 99, "--resume", "auto"]
    for processes, flags, newest in (
        (1, first, "epoch-0001-batch-000005"),
        (2, second, "epoch-0001-batch-000005-2-processes"),
    ):
        arguments = [*FLAGS, *flags, "--run-dir", run]
        result = run_training("accel_demo/train_ddp.py", arguments, processes)
        assert result.returncode == 0, result.stderr
        assert f"{counted(processes, 'process')} on cpu" in result.stdout
        expected = (run / "model.safetensors").read_bytes()
        interrupt_after(run, newest)
    assert "this leaves out 4 images of epoch 2, because a step now uses 8 images" in result.stdout
    arguments = [*FLAGS, "--resume", "auto", "--run-dir", run]
    result = run_training("accel_demo/train_ddp.py", arguments, 2)
    assert f"resumed from {checkpoint(run, newest)}, after step 13" in result.stdout
    assert result.returncode == 0 and "this leaves out" not in result.stdout
    assert (run / "model.safetensors").read_bytes() == expected


@pytest.mark.parametrize(
    ("used", "processes", "accumulate", "expected"),
    [
        (0, 2, 1, 0),
        (12, 4, 1, 3),
        (13, 4, 1, 4),
        (12, 1, 3, 12),
        (12, 2, 3, 6),
        (12, 4, 2, 4),
        (20, 4, 2, 6),
        (39, 4, 1, 10),
        (33, 4, 4, 10),  # the last step of the epoch, with two micro-batches, has begun
    ],
)
def test_another_number_of_processes_continues_with_its_next_whole_step(
    used, processes, accumulate, expected
):
    assert (
        next_step_after(used, processes, accumulate, batches_per_epoch=40 // processes) == expected
    )
