"""Test that a stopped or killed run, once resumed, has the results of an uninterrupted run."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from accel_demo import train_plain
from accel_demo.config import TrainConfig
from accel_demo.run.run import Run

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


class Killed(BaseException):
    """An exception that simulates SIGKILL. `except Exception` does not catch it."""


def train(run: Path, **choices) -> None:
    train_plain.main(TrainConfig(**CHOICES, run_dir=str(run), **choices))


def metrics_of(run: Path) -> list[dict]:
    """Return the evaluation results in metrics.jsonl, without the speed."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: line[name] for name in line if name != "images_per_second"}
        for line in lines
        if "test_loss" in line
    ]


def same_end(run: Path, other: Path) -> bool:
    weights, other_weights = (load_file(path / "model.safetensors") for path in (run, other))
    assert weights.keys() == other_weights.keys()
    same_weights = all(torch.equal(weights[name], other_weights[name]) for name in weights)
    return same_weights and metrics_of(run) == metrics_of(other)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    run = tmp_path_factory.mktemp("uninterrupted") / "run"
    train(run)
    return run


@pytest.mark.parametrize("step", range(1, STEPS))
def test_a_run_stopped_after_any_step_resumes_to_the_same_result(
    step, uninterrupted, tmp_path, monkeypatch, capsys
):
    """Step 3 is the last step of the first epoch."""
    monkeypatch.setattr(train_plain, "catch_stop_signals", StopAfter)
    monkeypatch.setattr(StopAfter, "last_step", step)
    train(tmp_path / "run")
    assert f"stopped after step {step};" in capsys.readouterr().out
    assert not (tmp_path / "run" / "summary.json").exists()
    monkeypatch.setattr(StopAfter, "last_step", 0)
    train(tmp_path / "run", resume="auto")
    assert same_end(tmp_path / "run", uninterrupted)


def test_a_signal_in_the_last_step_has_no_effect(uninterrupted, tmp_path, monkeypatch):
    monkeypatch.setattr(train_plain, "catch_stop_signals", StopAfter)
    monkeypatch.setattr(StopAfter, "last_step", STEPS)
    train(tmp_path / "run")
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
    assert len(metrics_of(tmp_path / "run")) == epoch
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


def test_the_mean_loss_is_printed_every_n_steps_also_after_a_resume(tmp_path, monkeypatch, capsys):
    """With log_every=1, the mean of each printed interval can be computed from metrics.jsonl."""
    choices = {"print_every": 3, "log_every": 1, "epochs": 4, "accumulate": 1, "label_smoothing": 0}
    choices = {**CHOICES, **choices, "run_dir": str(tmp_path / "run")}
    monkeypatch.setattr(train_plain, "catch_stop_signals", StopAfter)
    monkeypatch.setattr(StopAfter, "last_step", 7)  # inside an epoch and an interval
    train_plain.main(TrainConfig(**choices))
    monkeypatch.setattr(StopAfter, "last_step", 0)
    train_plain.main(TrainConfig(**choices, resume="auto"))
    pattern = r"epoch (\d)/4, step (\d+): train loss ([\d.]+), accuracy ([\d.]+)"
    printed = re.findall(pattern, capsys.readouterr().out)
    steps = [(int(epoch), int(step)) for epoch, step, _, _ in printed]
    assert steps == [(1, 3), (2, 6), (2, 9), (3, 12), (3, 15), (4, 18)]
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    lines = {line["step"]: line for line in lines if "train_loss" in line}
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
    choices = {**CHOICES, "log_every": log_every, "checkpoint_every": checkpoint_every}
    train_plain.main(TrainConfig(**choices, keep_last=9, run_dir=str(tmp_path / "run")))
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines if "train_loss" in line] == logged
    manifests = (tmp_path / "run" / "checkpoints").glob("*/manifest.json")
    assert sorted(json.loads(path.read_text())["step"] for path in manifests) == saved
