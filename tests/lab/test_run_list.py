"""Test the list of runs that `accel-demo report` and `predict` print without RUN."""

import json
import os
import re
import shlex
import time
from pathlib import Path

import pytest

from accel_demo import train_plain
from accel_demo.config import CommandLine, TrainConfig
from accel_demo.errors import UserError
from accel_demo.lab import predict
from accel_demo.lab.report import command as report
from accel_demo.lab.report.runs import FILES
from accel_demo.lab.run_list import FILES as LISTED_FILES
from accel_demo.wording import age
from tests.runs import read

FLAGS = "--dataset synthetic --model tiny_cnn --train-samples 64 --test-samples 20 --batch-size 32"
FLAGS += " --epochs 2 --augment --optimizer sgd --learning-rate 0.05"


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """The folder runs/ in the working directory. It does not exist yet."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def listed(command, capsys) -> tuple[dict[str, list[str]], str]:
    """Run a command without arguments. Return the other cells of each run, and the last line."""
    assert command([]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:-2]]
    assert lines[0].split() == "| run | test accuracy | last written | trained with |".split()
    return {run: cells for run, *cells in rows}, lines[-1]


def write_age(run: Path, seconds: float) -> None:
    """Make the files of a run as old as this."""
    for path in run.iterdir():
        os.utime(path, (time.time() - seconds,) * 2)


def test_the_options_in_the_list_start_the_same_run_again(runs, capsys):
    config, _ = CommandLine("").read(FLAGS.split())
    train_plain.main(config)
    capsys.readouterr()
    (folder,) = runs.iterdir()
    rows, last = listed(report.main, capsys)
    ((name, (accuracy, written, trained_with)),) = rows.items()
    assert (name, written[-6:]) == (f"runs/{folder.name}", " s ago")
    assert accuracy == f"{read(folder / 'summary.json')['test_accuracy']:.4f}"
    script, *flags = shlex.split(trained_with)
    assert script == "train_plain.py" and sorted(flags) == sorted(FLAGS.split())
    assert CommandLine("").read(flags)[0] == config
    assert last == f"for example: accel-demo report {name}"


@pytest.mark.parametrize("changes", [{"compile": True}, {"weight_decay": 0.1, "optimizer": "adam"}])
def test_only_options_that_differ_from_the_defaults_are_listed(changes, runs, capsys):
    config = TrainConfig(**changes)
    write_run(runs / "a", config)
    trained_with = listed(report.main, capsys)[0]["runs/a"][-1]
    assert CommandLine("").read(shlex.split(trained_with)[1:])[0] == config
    assert trained_with.count("--") == len(changes)


def write_run(folder: Path, config=None, epoch=0, accuracy=None, **environment) -> Path:
    """Write the files of a run. `epoch` is the epoch of the last line in metrics.jsonl."""
    folder.mkdir(parents=True)
    choices = vars(config or TrainConfig())
    (folder / "config.json").write_text(json.dumps(choices))
    environment = {"script": "train", "processes": 1, "mixed_precision": "no", **environment}
    (folder / "environment.json").write_text(json.dumps(environment))
    lines = "".join(json.dumps({"step": n, "epoch": n}) + "\n" for n in range(1, epoch + 1))
    (folder / "metrics.jsonl").write_text(lines + '{"step": 4, "ep')  # the last line is cut off
    if accuracy is not None:
        (folder / "summary.json").write_text(json.dumps({"test_accuracy": accuracy}))
    return folder


def test_the_latest_run_comes_first_with_its_age_and_its_progress(runs, capsys):
    write_age(write_run(runs / "old", accuracy=0.5, processes=4, mixed_precision="bf16"), 3 * 86400)
    write_age(write_run(runs / "new", epoch=3), 125)
    write_age(write_run(runs / "begun"), 7300)
    (runs / "timeline").mkdir()
    (runs / "notes.txt").touch()
    rows, last = listed(report.main, capsys)
    assert list(rows.items()) == [
        ("runs/new", ["unfinished, epoch 3 of 10", "2 min ago", "train.py"]),
        ("runs/begun", ["unfinished", "2 h ago", "train.py"]),
        ("runs/old", ["0.5000", "3 days ago", "train.py (4 processes, bf16)"]),
    ]
    assert last == "for example: accel-demo report runs/new"
    assert listed(predict.main, capsys) == (
        rows,
        "for example: accel-demo predict runs/old",
    ), "predict needs a finished run"


def test_without_a_finished_run_predict_says_that_it_needs_one(runs, capsys):
    write_run(runs / "new", epoch=3)
    last = listed(predict.main, capsys)[1]
    assert last == "none of them has finished, as `accel-demo predict` requires"


def test_damaged_files_are_listed_as_unknown_and_cannot_control_the_terminal(runs, capsys):
    run = write_run(runs / "a\x1b[2J")
    for name in ("summary", "environment"):
        (run / f"{name}.json").write_text("{")
    (run / "config.json").write_text(json.dumps({"model": "\x1b]0;title", "epochs": [1], "x": 2}))
    rows, _ = listed(report.main, capsys)
    accuracy, _, trained_with = rows["runs/a\\x1b[2J"]
    assert accuracy == "unknown"
    assert trained_with == "--model '\\x1b]0;title' --epochs '[1]'"


@pytest.mark.parametrize("command", [report.main, predict.main])
@pytest.mark.parametrize("content", [None, "file", "folder"])
def test_without_a_run_the_error_names_the_command_that_trains(command, content, runs):
    if content == "file":
        runs.touch()
    if content == "folder":
        (runs / "empty").mkdir(parents=True)
    with pytest.raises(UserError, match=r"^there is no run in runs/\. .*`accelerate .*train\.py`"):
        command([])


def test_predict_with_options_but_without_a_run_is_an_error(runs):
    write_run(runs / "a", accuracy=0.5)
    with pytest.raises(UserError, match="RUN is missing. To list the runs in runs/, type `accel-d"):
        predict.main(["--index", "3"])


@pytest.mark.parametrize("command", ["report", "predict"])
def test_the_list_needs_no_torch(command, runs, start):
    write_run(runs / "a", accuracy=0.5)
    code = "import sys; from accel_demo import cli; sys.argv = ['accel-demo', sys.argv[1]]\n"
    code += "try: cli.main()\nexcept SystemExit as end: print(end.code)\n"
    code += "print({'torch', 'numpy', 'accelerate', 'matplotlib'} & set(sys.modules))"
    done = start(["python", "-c", code, command], real=True, cwd=runs.parent)
    assert re.search("runs/a .*0.5000", done.stdout)
    assert done.stdout.endswith("0\nset()\n"), done.stdout + done.stderr


def test_the_list_and_the_report_agree_on_the_files_of_a_run():
    assert LISTED_FILES == tuple(FILES)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0 s ago"),
        (59.9, "59 s ago"),
        (60, "1 min ago"),
        (3600 * 1.9, "1 h ago"),
        (86400, "1 day ago"),
        (86400 * 400, "400 days ago"),
    ],
)
def test_an_age_is_rounded_down_to_its_largest_unit(seconds, text):
    assert age(seconds) == text
