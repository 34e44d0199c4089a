"""Test what `accel-demo` does before a command starts: help, mistakes, and how fast they appear."""

import json
import os

import pytest

from accel_demo import __version__
from accel_demo.cli import COMMANDS, HELPERS
from accel_demo.lab.bench.command import BENCHMARKS
from tests.conftest import BIN

SLOW = {"torch", "torchvision", "accelerate", "matplotlib", "numpy"}  # to import
WRONG_VALUES = {
    "audit": "--steps -1 train.py",
    "explain": "no/such/file.log",
    "doctor": "--join-timeout 0",
    "shards": "--split-batches --batch-size 5",
    "lr": "--samples 1000",
    "parity": "--batch-size 0",
    "timeline": "--straggler 1",
    "scaling": "--batch-size 129",
    "memory": "--model resnet18 --batch-size 1",
    "nodes": "--nodes 0",
    "crash": "--processes 3",
    "report": "no/such/run",
    "predict": "runs/train --plot x.gif",
    "bench": "nonsense",
    "bench dataparallel": "--global-batch 3",
    "bench precision": "--steps 0",
    "init": "/dev/null",
    "next": "now",
    "check": "10 --file no/such/file.py",
    "hint": "10 3",
    "reset": "99",
    "answer": "99",
    "help": "nonsense",
    "completion": "nonsense",
}
# Calls main() with several command lines. Prints their exit codes, and the modules imported so far.
CALLS = """
import json, sys
from accel_demo.cli import main

codes = []
for line in json.loads(sys.argv[1]):
    sys.argv = ["accel-demo", *line.split()]
    try:
        main()
    except SystemExit as end:
        codes.append(end.code)
print()
print(json.dumps([codes, [*sys.modules]]))
"""


@pytest.fixture
def typed(start, tmp_path):
    """`typed(*lines)` passes command lines to `main` in a new process.

    It returns their exit codes, what they print to stderr, and the SLOW modules that they import.
    """

    def typed(*lines: str) -> tuple[list[int], str, set[str]]:
        command = ["python", "-c", CALLS, json.dumps(lines)]
        result = start(command, cwd=tmp_path, real=True)
        assert result.returncode == 0, result.stderr
        codes, modules = json.loads(result.stdout.splitlines()[-1])
        return codes, result.stderr, SLOW.intersection(modules)

    return typed


NAMES = [*COMMANDS, *HELPERS, *(f"bench {name}" for name in BENCHMARKS)]


@pytest.mark.parametrize("name", NAMES)
def test_help_and_mistakes_are_reported_without_importing_torch(name, typed):
    codes, stderr, slow = typed(f"{name} -h", f"{name} --nonsense", f"{name} {WRONG_VALUES[name]}")
    assert (codes, slow) == ([0, 2, 2], set())
    lines = stderr.splitlines()
    assert len(lines) == 2 and all(line.startswith("error: ") for line in lines), stderr


@pytest.mark.parametrize("name", NAMES)
def test_help_appears_in_less_than_a_second(name, start):
    """The usual time is a fifth of a second of CPU time. Importing torch alone takes two."""
    before = os.times()
    result = start([BIN / "accel-demo", *name.split(), "-h"], real=True)
    after = os.times()
    assert result.returncode == 0 and "--help" in result.stdout
    used = after.children_user + after.children_system
    assert used - before.children_user - before.children_system < 1


def test_help_with_a_command_prints_the_same_as_the_flag(start):
    for words in ("", "timeline", "bench precision", "completion"):
        by_word = start(["accel-demo", "help", *words.split()])
        by_flag = start(["accel-demo", *words.split(), "--help"])
        assert by_word.returncode == by_flag.returncode == 0
        assert by_word.stdout == by_flag.stdout != ""
    assert start(["accel-demo"]).stdout == start(["accel-demo", "help"]).stdout


def test_help_lists_every_command_with_its_question(start):
    lines = start(["accel-demo", "--help"]).stdout.splitlines()
    for name, question in (COMMANDS | HELPERS).items():
        assert f"  {name:10}  {question}" in lines


def test_the_version_is_that_of_the_package(start):
    for command in ("accel-demo --version", "python -m accel_demo --version"):
        result = start(command.split())
        assert (result.returncode, result.stdout) == (0, f"accel-demo {__version__}\n")


@pytest.mark.parametrize(
    ("typed", "advice"),
    [
        ("audti", "did you mean accel-demo audit?"),
        ("time-line", "did you mean accel-demo timeline?"),
        ("mem", "did you mean accel-demo memory?"),
        ("foo", "accel-demo --help lists the commands"),
        ("train.py", "accel-demo --help lists the commands"),
    ],
)
def test_a_command_is_suggested_only_if_it_is_spelled_alike(typed, advice, start):
    result = start(["accel-demo", typed])
    assert result.returncode == 2
    assert result.stderr == f"error: there is no command {typed}; {advice}\n"


def test_an_unknown_flag_without_a_command_is_an_error(start):
    result = start(["accel-demo", "--verison"])
    assert result.returncode == 2
    assert result.stderr == "error: unrecognized arguments: --verison; did you mean --version?\n"
