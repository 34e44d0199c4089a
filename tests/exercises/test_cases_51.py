"""Test that the cases of exercise 51 come from real runs and have the causes that are graded."""

import ast
import json
import re

import pytest

from tests.exercises.wrong_answers import ANSWERS
from tests.lab.test_audit_course import audit, command_for
from tests.pages.pages import EXERCISES, load_grader

CASES = EXERCISES / "51_cases"
LOGGED = ANSWERS.parent / "cases_51"  # the scripts that have written the logs
PROGRAMS = {
    "a": LOGGED / "a.py",
    "b": LOGGED / "b.py",
    "c": CASES / "c.py",
    "d": CASES / "d.py",
    "e": CASES / "e.py",
}
CHECKS = {"a": "schedule", "b": "metrics", "c": "replicas", "d": "randomness", "e": "samples"}
NUMBER = r"-?\d+(?:\.\d+)?"


def shown(name: str) -> str:
    """Return the output that the learner reads: a log, or the indented lines of a docstring."""
    if (CASES / f"{name}.txt").exists():
        return (CASES / f"{name}.txt").read_text()
    docstring = ast.get_docstring(ast.parse(PROGRAMS[name].read_text())) or ""
    return re.sub("^    ", "", docstring.split("It prints:\n\n")[1], flags=re.MULTILINE)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_case_shows_what_its_script_prints(start, name):
    result = start(command_for(PROGRAMS[name]))
    lines, expected = sorted(result.stdout.splitlines()), sorted(shown(name).splitlines())
    assert result.returncode == 0, result.stderr
    assert [re.sub(NUMBER, "N", line) for line in lines] == [
        re.sub(NUMBER, "N", line) for line in expected
    ]
    for line, other in zip(lines, expected, strict=True):  # other processors round differently
        numbers = [[float(each) for each in re.findall(NUMBER, text)] for text in (line, other)]
        assert numbers[0] == pytest.approx(numbers[1], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_audit_finds_the_cause_of_a_case_and_nothing_else(tmp_path, name):
    options = "--json out.json --batches 0 --steps 0 --".split()
    result = audit(tmp_path, *options, *command_for(PROGRAMS[name]), timeout=600)
    findings = json.loads((tmp_path / "out.json").read_text())["findings"]
    assert [each["check"] for each in findings] == [CHECKS[name]], result.stdout


def test_the_logs_show_their_causes_in_numbers():
    rates = [float(text) for text in re.findall(r"learning rate ([\d.]+),", shown("a"))]
    assert rates == [0.075, 0.05, 0.025, 0, 0, 0, 0, 0]
    counts = re.findall(r"(\d+) right, (\d+) wrong", shown("b"))
    assert [int(right) + int(wrong) for right, wrong in counts] == [1008] * 4


def test_the_grader_contradicts_each_wrong_choice_in_the_list():
    grader, text = load_grader("51"), (EXERCISES / "51_diagnose.py").read_text()
    assert tuple(re.findall(r"^([a-z_]+)  +\w", text, re.MULTILINE)) == grader.CAUSES
    for case in grader.CASES.values():
        assert {case.cause, *case.against} == set(grader.CAUSES)
        assert case.cause not in case.against
