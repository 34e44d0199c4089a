"""Test every grader with its stub, our answer, right and wrong answers, and answers that misbehave.

answers/NN/right_* are other right answers than ours. Most were written independently of ours, from
page NN alone. wrong_answers.py explains how the wrong answers are stored.
"""

import ast
import re
import shutil
import tempfile
from pathlib import Path

import psutil
import pytest

from accel_demo.lab.course.exercises import all_exercises
from tests.exercises.wrong_answers import ANSWERS, edited, patched, wrong_answers
from tests.pages.pages import check

EXERCISES = all_exercises()
# The default run leaves out all but the first two right and three wrong answers of an exercise.
RIGHT = [
    pytest.param(file, marks=pytest.mark.answers if index >= 2 else (), id=f"{number}-{file.stem}")
    for number in EXERCISES
    for index, file in enumerate(sorted((ANSWERS / number).glob("right_*")))
]
WRONG = [
    pytest.param(
        number, name, marks=pytest.mark.answers if index >= 3 else (), id=f"{number}-wrong_{name}"
    )
    for number in EXERCISES
    for index, name in enumerate(wrong_answers(number))
]
MISTAKE_IN_STUB = {  # a part of the message
    "10": "with python alone, a function is not implemented yet",
    "11": "on 1 process, plain_step does not clip",
    "34": "first batch of the first epoch: level 0",
}
PRAISE = {  # a part of what is printed about our answer
    "20": "right: with 1, 2, 3 and 4 processes",
    "22": "The bonus is solved",
    "44": "1 on the other\n",
    "93": "right: on two and on three processes",
}
each_exercise = pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES)
IN_PYTHON = {number: one for number, one in EXERCISES.items() if one.original.suffix == ".py"}
each_in_python = pytest.mark.parametrize("exercise", IN_PYTHON.values(), ids=IN_PYTHON)


def is_rejected(
    result, number: str, message: str = "", section: str = "", is_late: bool = False
) -> bool:
    """Return True if the output is one mistake, which contains `message`, and the section to read.

    If `section` is not empty, the section must have this heading. If `is_late` is True, the answer
    must get no verdict, because it did not finish in time.
    """
    page = EXERCISES[number].page
    verdict, exit_code = ("no verdict", 4) if is_late else ("wrong", 1)
    printed = re.fullmatch(
        rf'{verdict}: (.*)\nRead "(.*)" in tutorials/(.*)\.\nFor a hint: .*\n',
        result.stdout,
        re.DOTALL,
    )
    return (
        (result.returncode, result.stderr) == (exit_code, "")
        and printed is not None
        and message in printed[1]
        and section in ("", printed[2])
        and re.search(rf"^##+ {re.escape(printed[2])}$", page.read_text(), re.MULTILINE) is not None
        and printed[3] == page.name
    )


@each_exercise
def test_the_stub_runs_and_is_rejected(start, tmp_path, exercise):
    copy = tmp_path / exercise.original.name
    copy.write_text(f"{exercise.original.read_text()}\n# changed\n")
    result = check(start, exercise.number, copy)
    message = MISTAKE_IN_STUB.get(exercise.number, "")
    assert is_rejected(result, exercise.number, message), result.stdout + result.stderr


@each_exercise
def test_our_answer_passes_with_a_space_in_its_path_and_in_that_of_temporary_files(start, exercise):
    # Do not use tmp_path, because it would make the path of a Unix socket too long.
    with tempfile.TemporaryDirectory(prefix="a b ") as folder:
        answer = shutil.copy(exercise.answer, Path(folder, f"my answer{exercise.answer.suffix}"))
        result = check(start, exercise.number, answer, TMPDIR=folder)
    assert (result.returncode, result.stderr) == (0, ""), result.stdout
    assert result.stdout.startswith("right: ")
    assert PRAISE.get(exercise.number, "") in result.stdout


@pytest.mark.parametrize("file", RIGHT)
def test_a_right_answer_by_someone_else_passes(start, file):
    result = check(start, file.parent.name, file)
    assert (result.returncode, result.stderr) == (0, ""), result.stdout


@pytest.mark.parametrize(("number", "name"), WRONG)
def test_a_wrong_answer_is_rejected_with_the_right_message(start, tmp_path, number, name):
    suffix, answer = EXERCISES[number].original.suffix, wrong_answers(number)[name]
    file = tmp_path / f"wrong_{name}{suffix}"
    file.write_text(answer.text)
    # Only an answer that hangs gets a short time limit, because others may need longer. On a busy
    # machine, importing Accelerate may take several seconds, so it is not shorter.
    hangs = "has not finished after" in answer.message
    result = check(start, number, file, **({"ACCEL_DEMO_PATIENCE": "10"} if hangs else {}))
    said = result.stdout + result.stderr
    assert is_rejected(result, number, answer.message, answer.section, is_late=hangs), said


@each_exercise
def test_an_exercise_has_two_hints_and_enough_answers_to_test_it(exercise):
    assert len(list((ANSWERS / exercise.number).glob("right_*"))) >= 2
    assert len(wrong_answers(exercise.number)) >= 3
    assert len(exercise.hints) == 2
    text = exercise.original.read_text()
    if exercise.number in IN_PYTHON:
        description = ast.get_docstring(ast.parse(text)) or ""
    else:
        description = text.removeprefix("#!/bin/bash\n# ")
    assert description.startswith(f"Exercise {exercise.number}: {exercise.title}.\n")


def test_wrong_answers_of_an_exercise_have_different_names():
    """YAML silently drops all but the last entry with the same name."""
    for edits in ANSWERS.glob("*/wrong.yaml"):
        names = re.findall(r"^(\w+):", edits.read_text(), re.MULTILINE)
        assert len(names) == len(set(names)) > 0, edits
        assert set(names) <= set(wrong_answers(edits.parent.name))


def test_an_edit_replaces_whole_lines_that_occur_exactly_once():
    text = "x = 1\nif x:\n    x = 1\n    x = 1\n"
    assert patched(text, "-x = 1\n+x = 2\n") == "x = 2\nif x:\n    x = 1\n    x = 1\n"
    assert patched(text, "@@\n if x:\n     x = 1\n+    y\n@@\n-    y\n") == text
    assert edited("x = 1", "1", "2") == "x = 2"
    for diff, count in (("-if\n", 0), ("-    x = 1\n", 2)):
        with pytest.raises(ValueError, match=f"exactly once, but occurs {count} times"):
            patched(text, diff)
    with pytest.raises(ValueError, match="must start with -, . or a space: 'x = 1"):
        patched(text, "x = 1\n+x = 2\n")


@each_exercise
def test_every_section_that_a_grader_names_is_on_the_page(exercise):
    headings = re.findall(r"^##+ (.*)$", exercise.page.read_text(), re.MULTILINE)
    assert {exercise.heading, *sections_named_in(exercise.grader)} <= {*headings, ""}


def sections_named_in(grader: Path) -> set[str]:
    """Return the strings that a grader uses as the section to read, directly or as a constant.

    They are the second argument of `Wrong`, a `read` argument, or returned beside a message.
    """
    tree = ast.parse(grader.read_text())
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            is_wrong = getattr(node.func, "id", "") == "Wrong"
            found += [word.value for word in node.keywords if word.arg == "read"]
            found += node.args[1:2] if is_wrong else []
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            found += node.value.elts[1:]
    found += [
        part for one in found if isinstance(one, ast.IfExp) for part in (one.body, one.orelse)
    ]
    values = [
        constants.get(one.id) if isinstance(one, ast.Name) else getattr(one, "value", None)
        for one in found
    ]
    return {value for value in values if isinstance(value, str)}


def test_the_sections_that_graders_name_are_found():
    assert len(set.union(*(sections_named_in(one.grader) for one in EXERCISES.values()))) >= 20


def blocks_of(page: Path) -> list[str]:
    """Return the Python code of a page: each block, and all blocks together."""
    text = page.read_text()
    blocks = re.findall(r"^ *```(?:python|py)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    # A diff shows a changed file: take the lines of the new version.
    for diff in re.findall(r"^ *```diff\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
        lines = [line for line in diff.splitlines() if not line.startswith(("-", "@@", "+++"))]
        blocks.append("\n".join(line[1:] for line in lines) + "\n")
    return [*blocks, "\n".join(blocks)]


@pytest.mark.slow
@each_in_python
def test_no_page_contains_code_that_passes_its_own_exercise(start, tmp_path, exercise):
    """Each block is checked alone, and in the exercise's file, in which it replaces functions."""
    stub = exercise.original.read_text()
    for number, block in enumerate(blocks_of(exercise.page)):
        for name, text in (
            (f"block_{number}.py", block),
            (f"after_{number}.py", f"{stub}\n{block}"),
        ):
            try:
                ast.parse(text)
            except SyntaxError:
                continue  # a part of a function or a diff cannot be an answer
            (tmp_path / name).write_text(text)
            result = check(start, exercise.number, tmp_path / name, ACCEL_DEMO_TIME_LIMIT="60")
            assert is_rejected(result, exercise.number), (
                f"code on the page:\n{block}{result.stdout}"
            )


TOO_LATE = "did not finish within|has not finished"
MISBEHAVIOR = {  # {first lines of an answer: regular expression for the message}
    "while True:\n    pass\n": TOO_LATE,
    "raise ValueError('oops')\n": r"ValueError: oops \(line 1 of your file\)",
    "raise SystemExit(3)\n": r"SystemExit: 3 \(line 1 of your file\)",
    "raise KeyboardInterrupt\n": r"KeyboardInterrupt \(line 1 of your file\)",
    "import os\nos._exit(3)\n": "exited early",
    "import missing_module\n": r"ModuleNotFoundError: No module named 'missing_module' \(line 1",
    "def broken(:\n": "SyntaxError",
}


@pytest.mark.slow
@pytest.mark.parametrize("lines", MISBEHAVIOR)
@each_in_python
def test_an_answer_that_misbehaves_gets_one_clear_message(start, tmp_path, exercise, lines):
    file = tmp_path / "answer.py"
    file.write_text(lines + exercise.answer.read_text())
    hangs = "while" in lines
    hurry = {"ACCEL_DEMO_PATIENCE": "3", "ACCEL_DEMO_TIME_LIMIT": "8"} if hangs else {}
    result = check(start, exercise.number, file, **hurry)
    assert is_rejected(result, exercise.number, is_late=hangs), result.stdout + result.stderr
    assert re.search(MISBEHAVIOR[lines], result.stdout), result.stdout


@pytest.mark.slow
@each_in_python
def test_an_answer_that_prints_and_forks_leaves_no_process_and_is_judged(start, tmp_path, exercise):
    file = tmp_path / "answer.py"
    sleeper = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\n"
    file.write_text(f"print('x' * 100_000)\n{sleeper}{exercise.answer.read_text()}")
    before = set(psutil.Process().children(recursive=True))
    result = check(start, exercise.number, file, real=True)
    assert (result.returncode, result.stderr) == (0, ""), result.stdout[-300:]
    assert result.stdout.startswith("right: ")
    assert not set(psutil.Process().children(recursive=True)) - before
