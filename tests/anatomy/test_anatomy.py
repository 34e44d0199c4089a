"""Tests for all programs in accel_demo/anatomy, two of pages, and the page that lists them."""

import ast
import importlib
import itertools
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from matplotlib.text import Text

from accel_demo import show
from accel_demo.anatomy.model_parallel import splits, tables
from accel_demo.processes.environment import RANK_VARIABLES, rank_environment
from tests.conftest import REPOSITORY

ANATOMY = REPOSITORY / "accel_demo" / "anatomy"
PAGE = (ANATOMY / "README.md").read_text()
COMMANDS = re.findall(r"python -m accel_demo\.anatomy\.(\w+)", PAGE)
PROGRAMS_OF_PAGES = ["tutorials/23_effective_batch.py", "tutorials/kernel_distance"]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if re.match(r"\| S\d", line)
]


def test_the_page_lists_exactly_the_programs_in_the_anatomy_folder():
    programs = {
        path.stem
        for path in ANATOMY.glob("*.py")
        if 'if __name__ == "__main__":' in path.read_text()
    } | {path.parent.name for path in ANATOMY.glob("*/__main__.py")}
    assert set(COMMANDS) == programs


def test_the_page_has_a_row_for_every_item_of_the_articles():
    numbers = [row[0].split()[0] for row in ROWS]
    wanted = {"S0": range(1, 13), "S1": range(2, 7), "S2": range(1, 10), "S3": range(1, 7)}
    expected = [f"{article}.{item}" for article, items in wanted.items() for item in items]
    assert numbers == [*expected, "S4.2", "S4.4", "S4.8"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].split()[0])
def test_each_row_names_functions_and_tests_that_exist(row):
    _, functions, tests = row
    names = re.findall(r"`([\w.]+)`", functions)
    assert names and functions.count("`") == 2 * len(names)
    for name in names:
        full_name = name if name.startswith("tutorials.") else f"accel_demo.{name}"
        module, _, attribute = full_name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
    tested = re.findall(r"`([\w/]+\.py)::(\w+)`", tests)
    assert tested and tests.count("`") == 2 * len(tested)
    for file, name in tested:
        tree = ast.parse((REPOSITORY / "tests" / file).read_text())
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert name in names and name.startswith("test_"), f"{file}::{name}"


def test_every_program_prints_its_help_and_exits(start):
    code = "import sys, runpy, warnings\nwarnings.simplefilter('error')\n"
    code += "for name in sys.argv[1:]:\n    sys.argv = [name, '--help']\n"
    code += "    try: runpy.run_path(name, run_name='__main__')\n"
    code += "    except SystemExit as end: assert not end.code\n"
    programs = [*COMMANDS, *PROGRAMS_OF_PAGES]
    shown = start(["python", "-c", code, *map(file_of, programs)])
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.count("--plot FILE") >= len(set(programs))


def file_of(program: str) -> Path:
    """Return the file of a program in accel_demo/anatomy, or of a page's program."""
    if "/" in program:
        return REPOSITORY / program
    path = ANATOMY / program.replace(".", "/")
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


TWO_LAUNCHES = """
import torch, torch.distributed as dist
from accel_demo.processes.group import run_in_group
def say(device):
    line = f"{dist.get_world_size()} x {torch.get_num_threads()} threads\\n"
    print(line, end="", flush=True)  # one write, so that the lines of two processes cannot mix
if __name__ == "__main__":
    run_in_group(say, 1)
    run_in_group(say, 2)
"""


def test_two_processes_use_one_thread_each_even_after_a_launch_of_one_process(start, tmp_path):
    program = tmp_path / "two_launches.py"
    program.write_text(TWO_LAUNCHES)
    result = start(["python", program], OMP_NUM_THREADS=None)
    assert result.returncode == 0, result.stderr
    assert "1 connected process on cpu" in result.stdout
    assert "2 connected processes on cpu" in result.stdout
    assert result.stdout.count("2 x 1 threads") == 2


def test_drawing_the_same_figure_twice_writes_identical_files(tmp_path):
    for name in ("one.svg", "two.svg"):
        figure = show.new_figure(3, 2)
        figure.subplots().plot([1, 2], label="a line")
        show.save(figure, tmp_path / name)
    assert (tmp_path / "one.svg").read_text() == (tmp_path / "two.svg").read_text()


AT_LEAST_TWO = "--processes must be at least 2, got 1"
BY_TORCHRUN = rank_environment(0, 1, 29500)
LAYERS = "--layers takes NxC, each from 1 to 512, as in 128x64, got"
SEVENTEEN = ",".join(map(str, range(17)))
MISTAKES = [  # (program, its arguments, start of the error message, environment)
    ("accumulation", "--processes 1", AT_LEAST_TWO, {}),
    ("asynchronous", "--processes 1", AT_LEAST_TWO, {}),
    ("asynchronous", "", AT_LEAST_TWO, BY_TORCHRUN),
    ("backends", "", "this program starts its own processes", BY_TORCHRUN),
    ("backends", "", "RANK is set, but not LOCAL_RANK, ", {"RANK": "0"}),
    ("data_parallel", "--replicas 0", "--replicas must be at least 1, got 0", {}),
    ("data_parallel", "bias --replicas -1", "--replicas must be at least 1, got -1", {}),
    ("data_parallel", "--batch-size 0", "--batch-size must be at least 1, got 0", {}),
    ("data_parallel", "bias --batch-size 7", "--batch-size is for step only, not for bias", {}),
    ("data_parallel", "other", "argument table: invalid choice: 'other'", {}),
    ("ddp", "x", "unrecognized arguments: x", {}),
    ("ddp.timeline", "x", "unrecognized arguments: x", {}),
    ("ddp.timeline", "--plot x.jpg", "--plot takes a .png, .svg or .pdf file, got x.jpg", {}),
    ("devices", "--plot map.svg", "--plot needs --visible. Add some ids, for example ", {}),
    ("devices", "--visible 0 --physical 0", "--physical must be from 1 to 16, got 0", {}),
    ("devices", "--visible GPU-1 --plot map.svg", "--plot draws numbers only, got 'GPU-1'", {}),
    ("devices", "--visible 1,,2 --plot map.svg", "--plot draws numbers only, got '1,,2'", {}),
    ("devices", "--visible '0, 0' --plot map.svg", "--plot draws each number only once", {}),
    ("devices", "--visible 4 --visible 0,00 --plot x.svg", "--plot draws each number only", {}),
    ("devices", "--visible +0,0 --plot map.svg", "--plot draws each number only once", {}),
    ("devices", f"--visible {SEVENTEEN} --plot map.svg", "--plot draws up to 16 ids", {}),
    ("dp_and_ddp", "--model alexnet", "argument --model: invalid choice: 'alexnet'", {}),
    ("dp_and_ddp", "--processes 5", "--processes must divide the batch of 24, got 5", {}),
    ("tutorials/23_effective_batch.py", "--processes 1", AT_LEAST_TWO, {}),
    ("tutorials/kernel_distance", "--layers big", f"{LAYERS} big", {}),
    ("tutorials/kernel_distance", "--layers 0x4", f"{LAYERS} 0x4", {}),
    ("tutorials/kernel_distance", "--layers 4x513", f"{LAYERS} 4x513", {}),
    ("tutorials/kernel_distance", "--processes 0", "--processes must be at least 1, got 0", {}),
    ("memory", "--model alexnet", "argument --model: invalid choice: 'alexnet'", {}),
    ("memory", "--optimizer lion", "argument --optimizer: invalid choice: 'lion'", {}),
    ("memory", "--processes 5", "--processes must divide the batch of 24, got 5", {}),
    ("model_parallel", "--microbatches 5", "--microbatches must be a divisor of the batch", {}),
    ("ring", "--processes 0", "--processes must be at least 1, got 0", {}),
    ("ring", "--processes two", "argument --processes: invalid int value: 'two'", {}),
    ("ring", "--processes 2", "--processes cannot be used with a launcher", BY_TORCHRUN),
    ("ring", "--plot x.gif", "--plot takes a .png, .svg or .pdf file, got x.gif", {}),
    ("ring", "--nonsense", "unrecognized arguments: --nonsense", {}),
]


@pytest.mark.parametrize(("program", "typed", "said", "environment"), MISTAKES)
def test_a_mistake_is_an_error_of_one_line_before_a_process_starts(
    program, typed, said, environment, monkeypatch, tmp_path, capfd
):
    monkeypatch.setattr(sys, "argv", [program, *shlex.split(typed)])
    monkeypatch.chdir(tmp_path)
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(file_of(program)), run_name="__main__")
    out, err = capfd.readouterr()
    assert (stopped.value.code, out, err.count("\n")) == (2, "", 1)  # ranks would print to `out`
    assert err.startswith(f"error: {said}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("pieces", "ranks"), [(11, 2), (16, 2), (32, 4)])
def test_no_texts_overlap_in_the_picture_of_a_long_pipeline(pieces, ranks, monkeypatch):
    figures = []
    monkeypatch.setattr(tables, "save", lambda figure, path: figures.append(figure))
    log = [(kind, piece) for kind in ("forward", "backward") for piece in range(pieces)]
    tables.draw(splits.timetable([log] * ranks), "")
    assert overlapping(figures[0]) == []


def overlapping(figure) -> list[tuple[str, str]]:
    """Return the pairs of texts in a figure that overlap."""
    figure.draw_without_rendering()
    places = {}
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text():
            places[text] = text.get_window_extent()
    return [
        (first.get_text(), second.get_text())
        for first, second in itertools.combinations(places, 2)
        if places[first].overlaps(places[second])
    ]
