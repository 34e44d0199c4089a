"""Test that a stopped or killed run, once resumed, has the results of an uninterrupted run."""

import re
import shutil
from pathlib import Path

import pytest

from accel_demo import train_plain
from accel_demo.config import TrainConfig
from accel_demo.run.manifest import MANIFEST, checkpoints_of
from accel_demo.run.run import Run
from tests.runs import Killed, lines_of, read, results_of, same_weights

# Two epochs of five micro-batches. Each epoch has windows of two, two and one micro-batches.
CHOICES = {"dataset": "synthetic", "model": "tiny_cnn", "train_samples": 40, "test_samples": 20}
CHOICES |= {"batch_size": 8, "epochs": 2, "accumulate": 2, "dropout": 0.3, "log_every": 4}
STEPS = 6


class StopAfter:
    """A replacement for `catch_stop_signals` that stops the run after `last_step`."""

    last_step = 0

    def __init__(self, log_every: int):
        pass

    def after(self, step: int) -> bool:
        return step == self.last_step


def train(run: Path, **choices) -> None:
    train_plain.main(TrainConfig(**{**CHOICES, "run_dir": str(run), **choices}))


def same_end(run: Path, other: Path) -> bool:
    return same_weights(run, other) and results_of(run) == results_of(other)


@pytest.fixture
def stop_after(monkeypatch):
    """`stop_after(step)` makes the following runs stop after this step, or never after step 0."""
    monkeypatch.setattr(train_plain, "catch_stop_signals", StopAfter)
    return lambda step: monkeypatch.setattr(StopAfter, "last_step", step)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    run = tmp_path_factory.mktemp("uninterrupted") / "run"
    train(run)
    return run


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_a_run_stopped_after_any_step_resumes_to_the_same_result(
    step, uninterrupted, tmp_path, stop_after, capsys
):
    """Step 3 is the last step of the first epoch. After the last step, there is nothing to stop."""
    stop_after(step)
    train(tmp_path / "run")
    is_stopped = f"stopped after step {step};" in capsys.readouterr().out
    assert is_stopped == (step < STEPS) != (tmp_path / "run" / "summary.json").exists()
    stop_after(0)
    if is_stopped:
        train(tmp_path / "run", resume="auto")
    assert same_end(tmp_path / "run", uninterrupted)


@pytest.mark.parametrize("checkpoint_every", [0, 1])
@pytest.mark.parametrize("epoch", [1, 2])
def test_a_run_killed_between_evaluating_and_saving_has_the_same_result(
    epoch, checkpoint_every, uninterrupted, tmp_path, monkeypatch
):
    save = Run.save

    def killed_before_it_saves(run: Run, save_state) -> None:
        if (run.progress.epoch, run.progress.batches) == (epoch, 0):
            raise Killed
        save(run, save_state)

    monkeypatch.setattr(Run, "save", killed_before_it_saves)
    with pytest.raises(Killed):
        train(tmp_path / "run", checkpoint_every=checkpoint_every)
    assert len(lines_of(tmp_path / "run", "test_loss")) == epoch
    monkeypatch.setattr(Run, "save", save)
    train(tmp_path / "run", checkpoint_every=checkpoint_every, resume="auto")
    assert same_end(tmp_path / "run", uninterrupted)


@pytest.mark.parametrize("max_steps", [4, 6])
def test_a_complete_run_that_is_resumed_does_not_train_further(max_steps, tmp_path, monkeypatch):
    """With max_steps=4, the run ends inside the second epoch, after its first step."""
    train(tmp_path / "run", max_steps=max_steps)
    shutil.copytree(tmp_path / "run", tmp_path / "before")
    monkeypatch.setattr(Run, "batches", None)  # makes the test fail if a batch is read
    train(tmp_path / "run", max_steps=max_steps, resume="auto")
    assert same_end(tmp_path / "run", tmp_path / "before")


def test_the_mean_loss_is_printed_every_n_steps_also_after_a_resume(tmp_path, stop_after, capsys):
    """With log_every=1, the mean of each printed interval can be computed from metrics.jsonl."""
    choices = {"print_every": 3, "log_every": 1, "epochs": 4, "accumulate": 1, "label_smoothing": 0}
    stop_after(7)  # inside an epoch and an interval
    train(tmp_path / "run", **choices)
    stop_after(0)
    train(tmp_path / "run", **choices, resume="auto")
    pattern = r"epoch (\d)/4, step (\d+): train loss ([\d.]+), accuracy ([\d.]+)"
    printed = re.findall(pattern, capsys.readouterr().out)
    steps = [(int(epoch), int(step)) for epoch, step, _, _ in printed]
    assert steps == [(1, 3), (2, 6), (2, 9), (3, 12), (3, 15), (4, 18)]
    lines = {line["step"]: line for line in lines_of(tmp_path / "run", "train_loss")}
    for _, step, loss, accuracy in printed:
        interval = [lines[number] for number in range(int(step) - 2, int(step) + 1)]
        for name, value in (("train_loss", loss), ("train_accuracy", accuracy)):
            mean = sum(line[name] for line in interval) / 3
            assert float(value) == pytest.approx(mean, abs=1e-4), (step, name)


def test_a_run_prints_at_its_own_interval_if_it_logs_less_often(tmp_path, capsys):
    train(tmp_path / "run", print_every=2)
    steps = re.findall(r"step (\d+): train loss", capsys.readouterr().out)
    assert steps == ["2", "4", "6"]


@pytest.mark.parametrize(
    ("log_every", "checkpoint_every", "logged", "saved"),
    [(4, 0, [3, 4, 6], [3, 6]), (5, 2, [2, 3, 4, 5, 6], [2, 3, 4, 6]), (9, 3, [3, 6], [3, 6])],
)
def test_a_run_logs_and_saves_at_its_intervals_and_after_each_epoch(
    log_every, checkpoint_every, logged, saved, tmp_path
):
    run = tmp_path / "run"
    train(run, log_every=log_every, checkpoint_every=checkpoint_every, keep_last=9)
    assert [line["step"] for line in lines_of(run, "train_loss")] == logged
    assert [read(path / MANIFEST)["step"] for path in reversed(checkpoints_of(run))] == saved
