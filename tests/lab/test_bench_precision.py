"""Test the settings of `bench precision`, and how it measures memory."""

import json

import pytest
import torch

from accel_demo.errors import one_line_errors
from accel_demo.lab.bench import command as bench
from accel_demo.lab.bench.stepped_training import SteppedTraining, bytes_of_a_step


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Run `bench precision`, and return its JSON and its picture."""
    folder = tmp_path_factory.mktemp("precision")
    files = {"json": folder / "report.json", "plot": folder / "report.svg"}
    options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    assert bench.main([*"precision --repeats 2 --models tiny_cnn --steps 2".split(), *options]) == 0
    return {"picture": files["plot"].read_text(), **json.loads(files["json"].read_text())}


def test_bf16_needs_less_memory_and_its_logits_are_coarser(report):
    speed, memory = report["tables"]
    assert list(speed["rows"]) == ["fp32", "bf16"]
    assert all(len(row["values"]) == 2 for row in speed["rows"].values())
    exact, low = (row["values"][0] for row in memory["rows"].values())
    assert low < exact
    [error] = [float(line.split()[-2]) for line in report["findings"] if "logits" in line]
    epsilon = torch.finfo(torch.bfloat16).eps
    assert epsilon / 8 < error < 4 * epsilon


def test_the_picture_shows_every_table(report):
    for words in ("images/s", "MB", "fp32", "bf16", "tiny_cnn"):
        assert words in report["picture"]


def test_the_memory_of_a_step_is_the_size_of_its_tensors():
    """Replace the training step with one that allocates a single large tensor (4 MB)."""
    training = SteppedTraining("tiny_cnn", "no", 4)
    training.step = lambda: torch.ones(10**6).sum()
    assert 4e6 <= bytes_of_a_step(training) < 4.1e6


@pytest.mark.parametrize(
    "arguments", ["--steps 0", "--models nonsense", "--repeats 0", "--stepz 3", "--models"]
)
def test_invalid_arguments_print_one_line_before_anything_starts(arguments, capsys):
    with pytest.raises(SystemExit) as stopped, one_line_errors():
        bench.main(["precision", *arguments.split()])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
