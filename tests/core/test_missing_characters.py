"""Test what is printed on a terminal that cannot show all characters."""

import io
import json
import sys

import pytest

from accel_demo.cli import COMMANDS, HELPERS
from accel_demo.errors import one_line_errors
from tests.core.test_cli import CALLS

ASCII = [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}]


def printed(text: str, encoding: str, monkeypatch) -> str:
    """Return what a program of ours writes to a terminal with this encoding."""
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", terminal)
    with one_line_errors():
        print(text, end="", flush=True)
    return terminal.buffer.getvalue().decode(encoding)


def test_missing_characters_are_replaced_by_similar_ones_or_question_marks(monkeypatch):
    text = "2 × 3 – 1 … √N ≠ 5 µs → é\udcff"
    assert printed(text, "ascii", monkeypatch) == "2 x 3 - 1 ... sqrt N != 5 us -> ??"
    assert printed(text, "latin-1", monkeypatch) == "2 × 3 - 1 ... sqrt N != 5 µs -> é?"
    assert printed(text, "utf-8", monkeypatch) == "2 × 3 – 1 … √N ≠ 5 µs → é?"


@pytest.mark.parametrize("environment", ASCII)
def test_help_and_errors_of_every_command_can_be_printed_in_ascii(environment, start):
    names = [*COMMANDS, *HELPERS]
    lines = [f"{name} {flag}" for name in names for flag in ("-h", "--nonsense=×")]
    command = ["python", "-c", CALLS, json.dumps(lines)]
    result = start(command, real=True, **environment)
    assert result.returncode == 0, result.stderr
    codes, _ = json.loads(result.stdout.splitlines()[-1])
    assert codes == [0, 2] * len(names)
    assert result.stdout.isascii() and result.stderr.isascii()
    assert "error: unrecognized arguments: --nonsense=x\n" in result.stderr
    assert len(result.stderr.splitlines()) == len(names)


@pytest.mark.parametrize("environment", ASCII)
def test_a_train_file_can_print_its_help_in_ascii(environment, start):
    result = start(["python", "accel_demo/train_plain.py", "-h"], real=True, **environment)
    assert (result.returncode, result.stderr) == (0, "")
    assert "--learning-rate" in result.stdout and result.stdout.isascii()
