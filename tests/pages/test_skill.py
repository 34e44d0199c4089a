"""Run all code on the page for coding assistants, and plant mistakes in its loops.

The page has to work outside the repository, so nothing here runs in it.
"""

import doctest
import os
import re
import runpy
import shlex
import subprocess
import sys

import pytest
import yaml
from safetensors.torch import load_file
from torch.testing import assert_close

from tests.conftest import BIN
from tests.observer.test_checks import findings_above_notes, observe
from tests.pages.pages import TUTORIALS, rows_below

PAGE = TUTORIALS / "SKILL.md"
_, FRONT_MATTER, TEXT = PAGE.read_text().split("---\n", 2)
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
NAMES = re.findall(r"^Save this as `(\w+\.py)`", TEXT, re.MULTILINE)
PROGRAMS = [text for language, text in BLOCKS if language == "python"]
FILES = dict(zip(NAMES, PROGRAMS, strict=True))
COMMANDS = [  # (command, its output)
    (command, output)
    for (language, command), (_, output) in zip(BLOCKS, BLOCKS[1:], strict=False)
    if language == "bash"
]
LAUNCHES = rows_below(PAGE, "Command, on a machine without GPUs")
CONNECTED, CLONES, ALONE = "2 connected", "2 clones", "1 process"
OF_LAUNCH = {CONNECTED: ["0 of 2", "1 of 2"], CLONES: ["0 of 1"] * 2, ALONE: ["0 of 1"]}
MOST_WORDS = 900


MISTAKES = [  # (program, text, replacement, the checks that find it); the default run has two
    ("train.py", "optimizer, train_loader, ", "optimizer, ", ["samples"]),
    ("train_ddp.py", "(model(x)", "(model.module(x)", ["replicas"]),
    ("train_ddp.py", "sampler.set_epoch(epoch)", "pass", ["order"]),
    ("train.py", "model, optimizer, train", "optimizer, train", ["replicas"]),
    ("train.py", "if accelerator.sync_gradients and not", "if not", ["schedule"]),
    ("train.py", "accelerator.gather_for_metrics", "accelerator.gather", ["metrics"]),
    ("train.py", "cpu=not torch.accelerator.is_available(),", "", ["connected", "deaths"]),
]
NOT_SEEN = [
    (" * ACCUMULATE / window", ""),
    ("steps = EPOCHS * ", "steps = 5 * EPOCHS * "),
]


def edited(program: str, old: str, new: str) -> str:
    """Return a program of the page in which a text is replaced."""
    assert old in FILES[program]
    return FILES[program].replace(old, new)


def write_programs(folder) -> None:
    for name, text in FILES.items():
        (folder / name).write_text(text)


def assert_printed(expected: str, printed: str) -> None:
    """Compare two texts. In the expected one, "..." stands for any text."""
    checker = doctest.OutputChecker()
    assert checker.check_output(expected, printed, doctest.ELLIPSIS), printed


def test_the_front_matter_is_that_of_a_skill_and_the_page_is_short():
    """Source: https://agentskills.io/specification"""
    front_matter = yaml.safe_load(FRONT_MATTER)
    assert front_matter.keys() == {"name", "description"}
    assert re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", front_matter["name"])
    assert len(front_matter["name"]) <= 64 and len(front_matter["description"]) <= 1024
    prose = runpy.run_path(str(TUTORIALS / "course.py"))["prose_of"](TEXT)
    assert len(prose.split()) <= MOST_WORDS


def test_every_block_of_the_page_is_tested():
    assert NAMES == ["train.py", "train_ddp.py"]
    languages = [language for language, _ in BLOCKS]
    assert set(languages) == {"python", "bash", "text"}
    assert [language for language in languages if language != "python"] == ["bash", "text"] * 4


@pytest.mark.parametrize("program", NAMES)
def test_a_loop_prints_what_the_page_says_in_two_connected_processes(program, start, tmp_path):
    """One process with twice the accumulation ends with the same weights."""
    write_programs(tmp_path)
    command, output = next(each for each in COMMANDS if each[0].endswith(f" {program}\n"))
    result = start(shlex.split(command), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout == output
    assert output.startswith("2 connected on cpu: ")
    if program == "train.py":
        weights = load_file(tmp_path / "model/model.safetensors")
        (tmp_path / "one.py").write_text(edited("train.py", "16, 3  #", "16, 6  #"))
        result = start(["python", "one.py"], cwd=tmp_path)
        assert result.stdout == output.replace("2", "1", 1), result.stderr
        assert_close(load_file(tmp_path / "model/model.safetensors"), weights)


@pytest.mark.parametrize("program", NAMES)
def test_the_audit_finds_nothing_in_a_loop(program, tmp_path):
    evidence = observe(FILES[program], tmp_path)
    assert min(evidence.counts("step")) >= 15
    assert findings_above_notes(evidence) == []


@pytest.mark.parametrize(
    ("program", "old", "new", "checks"),
    [*MISTAKES[:2], *(pytest.param(*each, marks=pytest.mark.slow) for each in MISTAKES[2:])],
)
def test_the_audit_finds_a_mistake_in_a_loop(program, old, new, checks, tmp_path):
    evidence = observe(edited(program, old, new), tmp_path)
    assert [finding.check for finding in findings_above_notes(evidence)] == checks


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), NOT_SEEN)
def test_the_audit_cannot_see_what_the_page_says_it_cannot(old, new, tmp_path):
    evidence = observe(edited("train.py", old, new), tmp_path)
    assert min(evidence.counts("step")) >= 15
    assert findings_above_notes(evidence) == []


SCRIPT = """
from accelerate import Accelerator
accelerator = Accelerator({})
print(f"{{accelerator.process_index}} of {{accelerator.num_processes}}\\n", end="", flush=True)
accelerator.wait_for_everyone()
"""


@pytest.mark.slow
@pytest.mark.parametrize("column", [1, 2], ids=["cpu=True", "plain"])
@pytest.mark.parametrize("row", LAUNCHES, ids=lambda row: row[0].strip("`"))
def test_a_launch_starts_the_processes_of_the_table(row, column, start, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.format(["", "cpu=True", ""][column]))
    words = shlex.split(row[0].strip("`").replace("SCRIPT", "script.py"))
    variables = dict(word.split("=") for word in words if re.match("[A-Z_]+=", word))
    result = start(words[len(variables) :], cwd=tmp_path, **variables)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == OF_LAUNCH[row[column]]


@pytest.mark.slow
@pytest.mark.timeout(900)  # four real starts of two processes
def test_the_commands_of_the_page_print_what_it_says(start, tmp_path):
    """In order, in one folder, in Bash, and without the fork server."""
    write_programs(tmp_path)
    path = f"{BIN}:{os.environ['PATH']}"
    for command, output in COMMANDS:
        result = start(["bash", "-ec", command], timeout=300, cwd=tmp_path, real=True, PATH=path)
        assert result.returncode == 0, result.stderr
        assert_printed(output, result.stdout)
    assert len(COMMANDS) == 4


def test_the_schema_is_where_the_page_says(tmp_path):
    [command] = re.findall(r"`python -c \"(.*?)\"`", TEXT)
    path = subprocess.check_output([sys.executable, "-c", command], cwd=tmp_path, text=True)
    assert path.endswith("schema.json\n") and os.path.exists(path.strip())
