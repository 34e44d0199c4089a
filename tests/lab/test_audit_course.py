"""Test that `accel-demo audit` finds in the course's programs only what is wrong on purpose.

The programs are those of the pages that train in several processes, and all right answers to the
exercises. They are recognized by their source code, so a new page's program is audited, too.
"""

import ast
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from accel_demo.lab.course.exercises import all_exercises
from tests.conftest import REPOSITORY, run_to_end
from tests.exercises.wrong_answers import ANSWERS
from tests.lab.test_audit import audit
from tests.observer.test_checks import findings_above_notes, observe

CASES = yaml.safe_load((REPOSITORY / "tests/observer/course.yaml").read_text())
TRAINS = re.compile(r"\.backward\(|\boptim\.[A-Z]|import .*\btrain\b")  # or imports what does
STARTS_SEVERAL = re.compile(
    r"run_in_group|results_by_rank|\bspawn\(|debug_launcher|notebook_launcher|torchrun|nproc"
    r"|two_processes\.yaml|\bgroup_sizes\b|run_ranks"
)
MODULES = ("accel_demo.anatomy.batch_norm",)  # a page starts them with python -m
QUICK = ("tutorials/11_accelerate.py", "tutorials/11_ddp.py", "tutorials/44_step.py")


def text_of(program: Path) -> str:
    """Return the source code of a program. It is a single file, or a folder with __main__.py."""
    files = sorted(program.glob("*.py")) if program.is_dir() else [program]
    return "\n".join(file.read_text() for file in files)


def trains_in_several_processes(*programs: Path) -> bool:
    text = "\n".join(map(text_of, programs))
    return bool(TRAINS.search(text) and STARTS_SEVERAL.search(text))


def name_of(program: Path) -> str:
    return str(program.relative_to(REPOSITORY))


def programs() -> list[Path]:
    """Return the programs of the pages, and the train files, that train in several processes."""
    folders = [file.parent for file in REPOSITORY.glob("tutorials/*/__main__.py")]
    files = [*REPOSITORY.glob("tutorials/*.py"), *REPOSITORY.glob("accel_demo/train*.py")]
    return sorted(each for each in (*files, *folders) if trains_in_several_processes(each))


def answers() -> list[tuple[str, Path]]:
    """Return (exercise, file) of each right answer to an exercise that trains in several."""
    return [
        (exercise.number, answer)
        for exercise in all_exercises().values()
        for answer in (exercise.answer, *sorted(ANSWERS.glob(f"{exercise.number}/right_*.py")))
        if trains_in_several_processes(exercise.grader, answer)
    ]


def command_for(program: Path) -> list[str]:
    """Return the first command in a program's docstring that starts several processes.

    Without one, it is the first command that starts the program, which then starts its processes.
    """
    main = program / "__main__.py" if program.is_dir() else program
    docstring = (ast.get_docstring(ast.parse(main.read_text())) or "").replace("\\\n", " ")
    start = rf"(?:python|torchrun|accelerate launch) .*{name_of(program)}.*"
    commands = [re.sub(" #.*", "", each) for each in re.findall(start, docstring)]
    several = [each for each in commands if re.search(r"torchrun|two_processes|nproc", each)]
    words = shlex.split((several or commands)[0])
    return [str(REPOSITORY / word) if (REPOSITORY / word).exists() else word for word in words]


def check_audit(name: str, command: list[str], folder: Path) -> None:
    case = CASES.get(name, {})
    options = case.get("audit", "").split()
    command = [*command, *case.get("program", "").split()]
    result = audit(folder, "--json", "out.json", *options, "--", *command, timeout=600)
    printed = result.stdout + result.stderr
    if error := case.get("error"):
        assert result.returncode == 2 and error in result.stderr, printed
        return
    report = json.loads((folder / "out.json").read_text())
    found = [each for each in report["findings"] if each["verdict"] != "note"]
    expected = case.get("findings", [])
    assert [finding["check"] for finding in found] == [check for check, _ in expected], printed
    for finding, (_, line) in zip(found, expected, strict=True):
        assert line in [place["text"] for place in finding["places"]], printed
    assert len(report["ranks"]) >= 2 and "connected" in report["checked"], printed
    assert report["waits"] == [] and result.returncode == bool(expected), printed


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("program", programs(), ids=name_of)
def test_a_program_of_a_page_is_right_or_wrong_on_purpose(program, tmp_path):
    command = command_for(program)
    if "--folder" in text_of(program):  # the programs of page 91
        run_to_end(["python", "tutorials/91_small_mnist.py", tmp_path / "data"])
        command += ["--folder", "data", "--epochs", "2"]
    check_audit(name_of(program), command, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("module", MODULES)
def test_a_module_of_a_page_causes_no_finding(module, tmp_path):
    check_audit(module, ["python", "-m", module], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize(("number", "answer"), answers(), ids=lambda each: Path(each).stem)
def test_a_right_answer_causes_no_finding(number, answer, tmp_path):
    grader = all_exercises()[number].grader
    (tmp_path / "reports").mkdir()
    command = ["python", grader, answer]
    if "group_sizes" in grader.read_text():
        command += ["--report", "reports"]
    if "__main__" in answer.read_text():
        torchrun = ["torchrun", "--standalone", "--nproc-per-node", "2"]
        command = [*torchrun, answer, "--folder", "reports", "--epochs", "2"]
    check_audit(name_of(answer), [*map(str, command)], tmp_path)


@pytest.mark.parametrize("name", QUICK)
def test_the_findings_of_a_program_in_forked_processes(name, tmp_path):
    found = findings_above_notes(observe((REPOSITORY / name).read_text(), tmp_path))
    expected = CASES.get(name, {}).get("findings", [])
    assert [finding.check for finding in found] == [check for check, _ in expected]
    for finding, (_, line) in zip(found, expected, strict=True):
        assert line in [place.text for place in finding.places]


def test_the_cases_name_programs_that_are_audited_and_say_why():
    names = {name_of(each) for each in (*programs(), *(answer for _, answer in answers()))}
    assert set(QUICK) | set(CASES) <= names
    assert all(case["why"].endswith(".") for case in CASES.values())
