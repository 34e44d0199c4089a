"""Test the list of exercises, the hints, and `accel-demo check --all`."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import exercises
import psutil
import pytest
from grading import Outcome

from accel_demo.errors import UserError
from accel_demo.lab.check import main
from accel_demo.processes.environment import environment_for
from tests.conftest import BIN, REPOSITORY
from tests.pages.pages import load_grader

STATES = [
    "not written yet",
    "not checked yet",
    "wrong",
    "wrong, but changed since",
    "right",
]


@pytest.fixture
def two(tmp_path, monkeypatch):
    """A copy of the exercises 33 and 90. Returns its folder."""
    folder = tmp_path / "exercises"
    shutil.copytree(exercises.EXERCISES, folder, ignore=shutil.ignore_patterns(".checked"))
    for grader in (folder / "graders").glob("[0-9]*.py"):
        if grader.stem not in ("33", "90"):
            grader.unlink()
    monkeypatch.setattr(exercises, "EXERCISES", folder)
    monkeypatch.setattr(exercises, "CHECKED", folder / ".checked")
    return folder


def states(capfd) -> dict[str, str]:
    """Return {number: state} in the list of exercises."""
    assert main([]) == 0
    lines = [line.split("|") for line in capfd.readouterr().out.splitlines() if "|" in line][2:]
    return {cells[1].strip(): cells[-2].strip() for cells in lines}


def test_the_list_shows_the_result_of_the_last_check_and_whether_the_file_has_changed(two, capfd):
    file = two / "90_visible_devices.py"
    seen = [states(capfd)]
    file.write_text(f"{file.read_text()}\n# changed\n")
    seen.append(states(capfd))
    assert main(["90"]) == 1
    seen.append(states(capfd))
    file.write_text((two / "answers" / file.name).read_text())
    seen.append(states(capfd))
    assert main(["90"]) == 0
    seen.append(states(capfd))
    assert [row["90"] for row in seen] == STATES
    assert {row["33"] for row in seen} == {"not written yet"}


@pytest.mark.parametrize("number", exercises.all_exercises())
def test_an_unchanged_exercise_file_is_not_graded(tmp_path, capfd, number):
    """If you have changed the exercise, store its new hash in hints.yaml: `sha256sum FILE`."""
    copy = tmp_path / "answer.py"
    copy.write_bytes(exercises.Exercise(number).file.read_bytes().replace(b"\n", b"\r\n"))
    for file in ([], ["--file", str(copy)]):
        assert main([number, *file]) == 5
        printed = capfd.readouterr().out
        assert printed.startswith("not written yet: ")
        assert printed.endswith(f"For a hint: accel-demo check {number} --hint\n")


def test_a_check_of_another_file_does_not_change_the_state_of_the_exercise(two, capfd):
    assert main(["90", "--file", str(two / "answers" / "90_visible_devices.py")]) == 0
    assert states(capfd)["90"] == "not written yet"


def test_all_exercises_are_checked_in_one_go(two, capfd):
    file = two / "90_visible_devices.py"
    file.write_text((two / "answers" / file.name).read_text())
    assert main(["--all"]) == 1
    printed = capfd.readouterr().out
    titles = [f"{number} {exercises.Exercise(number).title}" for number in ("33", "90")]
    expected = [titles[0], "not written yet: ", titles[1], "right: "]
    places = [printed.index(text) for text in expected]
    assert places == sorted(places)
    assert printed.endswith("1 of 2 exercises are right\n")
    answer = two / "answers" / "33_precision_setting.py"
    (two / answer.name).write_text(answer.read_text())
    assert main(["--all"]) == 0


def test_hints_and_the_answer_are_shown_on_request(capsys):
    hints = [
        main(["90", *flags]) == 0 and capsys.readouterr().out
        for flags in (["--hint"], ["--hint", "1"], ["--hint", "2"])
    ]
    assert hints[0] == hints[1] != hints[2]
    assert hints[0].startswith("hint 1 of 2: ") and hints[2].startswith("hint 2 of 2: ")
    assert main(["90", "--answer"]) == 0
    assert capsys.readouterr().out == exercises.Exercise("90").answer.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("99", "there is no exercise 99. Choose one of 10, 11, "),
        ("--hint", "--hint needs an exercise: accel-demo check 10 --hint"),
        ("--hint 20", "--hint needs an exercise: accel-demo check 10 --hint"),
        ("--answer", "--answer needs an exercise: accel-demo check 10 --answer"),
        ("--file x.py", "--file needs an exercise: accel-demo check 10 --file my_answer.py"),
        ("10 --all", "--all checks every exercise: leave out the number"),
        ("10 --file nothing.py", "no answer file at nothing.py. Specify one with --file."),
        ("10 --hint 3", "there are two hints: --hint must be 1 or 2, got 3"),
        ("10 --hint --answer", "not allowed with argument"),
        ("10 --file README.md", "README.md must be a Python file with a name that ends in .py"),
    ],
)
def test_bad_input_is_reported_in_one_line(arguments, message):
    with pytest.raises(UserError, match=message):
        main(arguments.split())


# An answer that writes its process ID to a file, and then survives Ctrl-C.
STUBBORN = """import os, pathlib, time
pathlib.Path(os.environ["PID_FILE"]).write_text(str(os.getpid()))
while True:
    try:
        time.sleep(60)
    except BaseException:
        pass
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_check_leaves_no_process(tmp_path, number):
    answer, pid_file = tmp_path / "answer.py", tmp_path / "pid"
    answer.write_text(STUBBORN)
    command = [sys.executable, BIN / "accel-demo", "check", "90", "--file", answer]
    environment = environment_for({"PID_FILE": str(pid_file)})
    checked = subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, start_new_session=True, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 60
        while not (pid_file.exists() and pid_file.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        stubborn = psutil.Process(int(pid_file.read_text()))
        checked.send_signal(number)
        assert checked.wait(60) == 128 + number
        stubborn.wait(30)
    finally:
        checked.kill()


GRADER = """import sys
from accel_demo.errors import UserError
from grading import Wrong, verdict

def judge():
    {}

sys.exit(verdict(__file__, judge))
"""
FAILURES = {  # {what the grader does: regular expression for stderr}
    "1 / 0": r"Traceback .*\nZeroDivisionError: division by zero\n",
    "raise UserError('x is missing. Restore it.')": r"error: x is missing\. Restore it\.\n",
}


@pytest.mark.parametrize("line", FAILURES)
def test_a_check_that_fails_itself_is_not_a_wrong_answer(two, capfd, line):
    (two / "90_visible_devices.py").write_text("")
    (two / "graders" / "90.py").write_text(GRADER.format(line))
    assert main(["90"]) == 3
    printed = capfd.readouterr()
    assert printed.out == "the check itself failed, so your answer was not graded\n"
    assert re.fullmatch(FAILURES[line], printed.err, re.DOTALL)
    assert states(capfd)["90"] == "not checked yet"


@pytest.mark.parametrize(
    ("mistake", "reason"),
    [
        ("your file raised an error: SystemExit: 0", "the file raised an error: SystemExit: 0"),
        ("", "log.jsonl cannot be read"),
    ],
)
def test_a_mistake_in_our_answer_is_not_blamed_on_the_learner(tmp_path, mistake, reason):
    outcome = Outcome(0, "", {"1-0": {"mistake": mistake, "seen": []}}, 1)
    with pytest.raises(UserError, match=rf"^our answer, .* has failed \(if .*\): {reason}"):
        load_grader("12").judge_ours(outcome, tmp_path)


@pytest.mark.parametrize(
    ("line", "code", "state"),
    [
        ("return 'x'", 0, "right"),
        ("raise Wrong('x')", 1, "wrong"),
        ("1 / 0", 3, "right"),
        ("raise UserError('x')", 3, "right"),
    ],
)
def test_a_closed_pipe_changes_neither_the_verdict_nor_the_record(
    two, capfd, monkeypatch, line, code, state
):
    (two / "90_visible_devices.py").write_text("")
    (two / "graders" / "90.py").write_text(GRADER.format(line))
    exercise = exercises.Exercise("90")
    exercise.record(True, exercise.digest())
    read_end, write_end = os.pipe()
    os.close(read_end)  # as `| head` does
    with open(write_end, "w") as closed, monkeypatch.context() as context:
        context.setattr(sys, "stdout", closed)
        context.setattr(sys, "stderr", closed)
        assert main(["90"]) == code
    assert states(capfd)["90"] == state


@pytest.mark.parametrize("unbuffered", [None, "1"])
@pytest.mark.parametrize(("text", "code"), [("", 1), (None, 5)], ids=["wrong", "unchanged"])
def test_a_closed_pipe_does_not_change_the_exit_code(start, tmp_path, text, code, unbuffered):
    file = tmp_path / "answer.py"
    file.write_text(exercises.Exercise("90").file.read_text() if text is None else text)
    command = f"accel-demo check 90 --file {file} | head -c 0; exit ${{PIPESTATUS[0]}}"
    result = start(["bash", "-c", command], PYTHONUNBUFFERED=unbuffered)
    assert (result.returncode, result.stderr) == (code, "")
