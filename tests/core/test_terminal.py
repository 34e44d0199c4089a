"""Test that text fits the terminal, and that text in a pipe or a file stays as it is."""

import importlib
import runpy
import sys

import pytest

from accel_demo import cli, terminal
from tests.conftest import REPOSITORY
from tests.support.pseudo_terminal import shown_on_terminal

COMMAND = "accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml train.py"
TRAIN_FILES = ("train", "train_plain", "train_dp", "train_ddp")


def shown(text: str, columns: int) -> list[str]:
    return shown_on_terminal(lambda: terminal.display(text), columns).splitlines()


def print_help(*arguments: str) -> None:
    """Print the help of a program: "train", or a command with its arguments."""
    name, *rest = arguments
    with pytest.raises(SystemExit, match="0"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_COLOR", "1")  # from Python 3.14 on, argparse uses colors on a terminal
        patch.setattr(sys, "argv", [name, *rest, "-h"])
        if name in TRAIN_FILES:
            runpy.run_path(str(REPOSITORY / f"accel_demo/{name}.py"), run_name="__main__")
        elif name == "accel-demo":
            cli.main()
        else:
            path = name if name in cli.SINGLE_MODULES else f"{name}.command"
            importlib.import_module(f"accel_demo.lab.{path}").main([*rest, "-h"])


def test_a_long_line_is_wrapped_on_a_terminal_and_nowhere_else(capsys):
    text = "cure: Let only the main process write the file, or give each rank a file of its own."
    assert shown(text, columns=50) == [
        "cure: Let only the main process write the file, or",
        "  give each rank a file of its own.",
    ]
    terminal.display(text)
    assert capsys.readouterr().out == f"{text}\n"


@pytest.mark.parametrize(
    ("text", "indent"),
    [
        ("Some words of a sentence that is too long for one line", 0),
        ("  Some words of a sentence that is too long for one line", 2),
        ("- Some words of a sentence that is too long for one line", 2),
        ("(1) Some words of a sentence that is too long for one line", 4),
        ("--- Some words of a sentence that is too long for one line", 4),
        ("  audit     What is wrong with my training script, or not?", 12),
        ("  cure: Some words of a sentence that is too long for a line", 4),
    ],
)
def test_the_lines_after_the_first_begin_below_its_text(text, indent):
    first, *others = shown(text, columns=40)
    assert others and all(len(line) <= 40 for line in (first, *others))
    assert {len(line) - len(line.lstrip()) for line in others} == {indent}
    assert " ".join([first, *map(str.strip, others)]) == text


@pytest.mark.parametrize("code", [f"stopped; to continue: {COMMAND}", f"      {COMMAND}", COMMAND])
def test_a_command_and_a_line_of_code_stay_on_one_line(code):
    assert [line for line in shown(code, columns=40) if COMMAND in line]


def test_inline_code_is_not_wrapped():
    lines = shown("The sampler needs `sampler.set_epoch(epoch) # in each` epoch.", columns=40)
    assert lines == ["The sampler needs", "`sampler.set_epoch(epoch) # in each`", "epoch."]


def test_a_paragraph_that_was_wrapped_for_a_wider_terminal_is_wrapped_again(capsys):
    text = "First line of a paragraph of two lines,\nand its second line.\n\n"
    text += "python train.py\nA list:\n  a  b"

    def show() -> None:
        print(terminal.reflowed(text))

    assert shown_on_terminal(show, 30).splitlines() == [
        "First line of a paragraph of",
        "two lines, and its second",
        "line.",
        "",
        "python train.py",
        "A list:",
        "  a  b",
    ]
    assert shown_on_terminal(show, 80) == f"{text}\n"
    show()
    assert capsys.readouterr().out == f"{text}\n"


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize(
    "arguments",
    [
        ("accel-demo",),
        *((command,) for command in cli.COMMANDS),
        ("bench", "dataparallel"),
        ("bench", "precision"),
        *((name,) for name in TRAIN_FILES),
    ],
    ids=" ".join,
)
def test_no_line_of_the_help_is_wider_than_the_terminal(arguments, columns):
    text = shown_on_terminal(lambda: print_help(*arguments), columns)
    assert "options:" in text
    assert [line for line in text.splitlines() if len(line) > columns] == []


@pytest.mark.parametrize("arguments", [("audit",), ("check",), ("train",)], ids=" ".join)
def test_the_help_in_a_pipe_has_the_lines_of_the_docstring(arguments, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    print_help(*arguments)
    path = "accel_demo.train" if arguments == ("train",) else f"accel_demo.lab.{arguments[0]}"
    module = importlib.import_module(path + ".command" * (arguments == ("audit",)))
    assert module.__doc__.strip() in capsys.readouterr().out


def test_an_example_that_is_too_long_continues_after_a_backslash():
    lines = shown_on_terminal(lambda: print_help("train"), 80).splitlines()
    first = lines.index(
        "accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \\"
    )
    assert lines[first + 1] == "    accel_demo/train.py"
