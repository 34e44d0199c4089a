"""Test that there are progress bars only on a terminal, and a few plain lines in a log."""

import ast
import re
from functools import partial

import pytest

from accel_demo.progress_bar import ProgressBar
from accel_demo.run import run as run_module
from accel_demo.run.log import TrainLog
from tests.conftest import REPOSITORY
from tests.runs import train_here
from tests.support.pseudo_terminal import shown_on_terminal

# Two epochs of five micro-batches on one process
CHOICES = {"dataset": "synthetic", "model": "tiny_cnn", "train_samples": 40, "test_samples": 20}
CHOICES |= {"batch_size": 8, "epochs": 2, "log_every": 2}
FLAGS = [
    word for name, value in CHOICES.items() for word in (f"--{name.replace('_', '-')}", str(value))
]
LINE = r"(epoch \d/2: batch \d/\d(?:, loss [\d.]+, accuracy [\d.]+, [\d,]+ images/s)?)"


def files_with_bars() -> list[str]:
    """Return the files that use tqdm itself."""
    paths = [
        path.relative_to(REPOSITORY)
        for folder in ("accel_demo", "benchmarks", "tutorials")
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
    ]
    return [str(path) for path in paths if re.search(r"\btqdm\(", (REPOSITORY / path).read_text())]


@pytest.mark.parametrize("file", files_with_bars())
def test_every_bar_is_disabled_unless_stderr_is_a_terminal(file):
    """tqdm checks this if `disable` is None. Ranks without a bar pass True instead."""
    tree = ast.parse((REPOSITORY / file).read_text())
    values = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tqdm"
    ]
    for call in calls:
        value = next((each.value for each in call.keywords if each.arg == "disable"), call)
        value = values[value.id] if isinstance(value, ast.Name) else value
        assert re.fullmatch(r"None( if .* else True)?", ast.unparse(value)), ast.unparse(call)


def test_a_log_gets_a_line_at_the_start_and_then_one_per_interval(capsys):
    for _ in ProgressBar("measuring", "run", range(3), seconds_between_lines=0):
        pass
    lines = [f"measuring: run {number}/3, 0 s\n" for number in range(4)]
    assert capsys.readouterr().err == "".join(lines)


def test_a_short_measurement_prints_one_line_into_a_log(capsys):
    with ProgressBar("measuring", "run", total=3) as bar:
        bar.update(2)
    assert capsys.readouterr().err == "measuring: run 0/3, 0 s\n"


def test_only_one_rank_prints_lines(capsys):
    for _ in ProgressBar("measuring", "run", range(3), is_shown=False, seconds_between_lines=0):
        pass
    assert capsys.readouterr().err == ""


def test_on_a_terminal_there_is_a_bar_and_no_line():
    def measure() -> None:
        for _ in ProgressBar("measuring", "run", range(3), seconds_between_lines=0):
            pass

    screen = shown_on_terminal(measure, 80)
    assert "\rmeasuring: 100%|" in screen and "3/3" in screen
    assert "run 1/3" not in screen


def test_training_shows_a_bar_on_a_terminal_and_no_line(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "TrainLog", partial(TrainLog, silence=0))
    screen = shown_on_terminal(lambda: train_here("train.py", tmp_path / "run", **CHOICES), 100)
    assert "\repoch 1/2:   0%|" in screen
    assert not re.search(LINE, screen)


def test_after_a_long_silence_training_prints_a_line_into_a_log(tmp_path, monkeypatch, capsys):
    """With a silence of 0 s, after every batch. The metrics are those of the last interval."""
    monkeypatch.setattr(run_module, "TrainLog", partial(TrainLog, silence=0))
    train_here("train_plain.py", tmp_path / "run", **CHOICES)
    lines = re.findall(f"^{LINE}$", capsys.readouterr().err, re.MULTILINE)
    batches = [line.split(",")[0] for line in lines]
    assert batches == [f"epoch {e}/2: batch {b}/5" for e in (1, 2) for b in range(1, 6)]
    assert ["loss" in line for line in lines[:3]] == [False, True, True]


def test_training_with_short_epochs_prints_no_progress_into_a_log(tmp_path, capsys):
    train_here("train_plain.py", tmp_path / "run", **CHOICES)
    assert not re.search(LINE, capsys.readouterr().err)


@pytest.mark.parametrize(("processes", "batches"), [(1, 5), (2, 2)])
def test_a_log_of_training_has_no_carriage_return(processes, batches, start, tmp_path):
    config = "cpu.yaml" if processes == 1 else "cpu_two_processes.yaml"
    command = ["accelerate", "launch", "--config_file", f"accelerate_configs/{config}"]
    command += ["tests/core/talkative_train.py", *FLAGS, "--run-dir", str(tmp_path / "run")]
    result = start(command)
    assert result.returncode == 0, result.stderr
    assert f"{processes} process" in result.stdout
    assert "\r" not in result.stdout + result.stderr
    assert len(re.findall(LINE, result.stderr)) == 2 * batches  # only rank 0 prints them
    assert re.findall(r"^epoch (\d)/2: train loss", result.stdout, re.MULTILINE) == ["1", "2"]
