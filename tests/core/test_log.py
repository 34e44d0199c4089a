"""Test what a run with `--track tensorboard` writes, by reading the files as TensorBoard does."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import train_in
from tests.runs import VERSIONS, interrupt_after, lines_of, read, train_here

# An epoch has 8 steps in one process (4 in two) and ends with a checkpoint.
CHOICES = {"dataset": "synthetic", "model": "tiny_cnn", "train_samples": 64, "test_samples": 20}
CHOICES |= {"batch_size": 8, "epochs": 3, "log_every": 3, "track": "tensorboard"}
TAGS = {  # TensorBoard's tag: the name in metrics.jsonl
    "train/loss": "train_loss",
    "train/accuracy": "train_accuracy",
    "train/learning_rate": "learning_rate",
    "train/images_per_second": "images_per_second",
    "test/loss": "test_loss",
    "test/accuracy": "test_accuracy",
}


def steps_in_tensorboard(run: Path) -> dict[str, list[int]]:
    """Return the steps of each curve, after comparing its values with metrics.jsonl."""
    logged = EventAccumulator(str(run / "tensorboard")).Reload()
    tags = logged.Tags()
    assert [kind for kind, names in tags.items() if names] == ["scalars"]
    assert sorted(tags["scalars"]) == sorted(TAGS)
    for tag, name in TAGS.items():
        points, lines = logged.Scalars(tag), lines_of(run, name)
        assert [point.step for point in points] == [line["step"] for line in lines]
        values = [line[name] for line in lines]
        assert [point.value for point in points] == pytest.approx(values, rel=1e-6)  # float32
    return {tag: [point.step for point in logged.Scalars(tag)] for tag in TAGS}


def event_files(run: Path) -> int:
    return len(list((run / "tensorboard").iterdir()))


@pytest.mark.parametrize("file", VERSIONS)
def test_each_curve_has_a_tag_and_a_point_for_each_line_of_the_metrics(file, tmp_path):
    run = train_here(file, tmp_path / "run", **CHOICES)
    steps = steps_in_tensorboard(run)
    assert steps["train/loss"] == [3, 6, 8, 9, 12, 15, 16, 18, 21, 24]
    assert steps["train/loss"] == steps["train/accuracy"] == steps["train/learning_rate"]
    assert steps["test/loss"] == steps["test/accuracy"] == [8, 16, 24]
    assert event_files(run) == 1


@pytest.mark.parametrize(("file", "processes"), [("train.py", 2), ("train_plain.py", 1)])
def test_a_resumed_run_continues_the_curves_without_repeating_a_step(file, processes, tmp_path):
    """The run logs all steps, is then set back to the end of its second epoch, and goes on."""
    flags = [
        word for name, value in CHOICES.items() for word in (f"--{name.replace('_', '-')}", value)
    ]
    run = train_in(tmp_path / "run", file, *flags, processes=processes)
    first = steps_in_tensorboard(run)
    assert first["test/loss"] == ([4, 8, 12] if processes == 2 else [8, 16, 24])
    assert event_files(run) == 1, "only the main process writes"
    interrupt_after(run, "epoch-0002-batch-000000")
    train_in(run, file, *flags, "--resume", "auto", processes=processes)
    assert read(run / "start.json")["step"] == first["test/loss"][1]
    assert steps_in_tensorboard(run) == first
    assert event_files(run) == 2
