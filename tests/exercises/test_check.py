"""Test the commands for a learner's course: init, next, check, hint, reset and answer."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
from grading import Outcome

from accel_demo.errors import UserError
from accel_demo.files import write_whole
from accel_demo.lab import answer, hint, init, next, reset
from accel_demo.lab.check import main
from accel_demo.lab.course import exercises
from accel_demo.lab.course.folder import STATE, Course, digest_of
from accel_demo.processes.environment import environment_for
from tests.conftest import BIN, REPOSITORY
from tests.exercises.wrong_answers import wrong_answers
from tests.pages.pages import load_grader

STATES = ["not started", "not checked yet", "wrong", "wrong, changed since", "right"]


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A course in the current folder."""
    course = Course(tmp_path / "course")
    course.folder.mkdir()
    course.update()
    monkeypatch.chdir(course.folder)
    return course


@pytest.fixture
def two(course, tmp_path, monkeypatch):
    """The folder of a course's exercises, of which only 33 and 90 have a grader."""
    folder = tmp_path / "originals"
    shutil.copytree(exercises.EXERCISES, folder)
    for grader in (folder / "graders").glob("[0-9]*.py"):
        if grader.stem not in ("33", "90"):
            grader.unlink()
    monkeypatch.setattr(exercises, "EXERCISES", folder)
    return course.folder / "tutorials" / "exercises"


def states(capfd) -> dict[str, str]:
    """Return {number: state} in the list of exercises."""
    assert main([]) == 0
    lines = [line.split("|") for line in capfd.readouterr().out.splitlines() if "|" in line][2:]
    return {cells[1].strip(): cells[-2].strip() for cells in lines}


def solve(number: str, folder) -> None:
    """Write our answer to the exercise file."""
    ours = exercises.Exercise(number).answer
    write_whole(folder / ours.name, ours.read_bytes())


def test_the_list_shows_the_result_of_the_last_check_and_whether_the_file_has_changed(two, capfd):
    file = two / "90_visible_devices.py"
    seen = [states(capfd)]
    file.write_text(f"{file.read_text()}\n# changed\n")
    seen.append(states(capfd))
    assert main(["90"]) == 1
    seen.append(states(capfd))
    solve("90", two)
    seen.append(states(capfd))
    assert main(["90"]) == 0
    seen.append(states(capfd))
    assert [row["90"] for row in seen] == STATES
    assert {row["33"] for row in seen} == {"not started"}


@pytest.mark.parametrize("number", exercises.all_exercises())
def test_an_unchanged_exercise_file_is_not_graded(course, tmp_path, capfd, number):
    original = exercises.Exercise(number).original
    copy = tmp_path / f"answer{original.suffix}"
    copy.write_bytes(original.read_bytes().replace(b"\n", b"\r\n"))
    for file in ([], ["--file", str(copy)]):
        assert main([number, *file]) == 5
        printed = capfd.readouterr().out
        assert printed.startswith("not started: ")
        assert printed.endswith(f"For a hint: accel-demo hint {number}\n")


def test_a_check_of_another_file_does_not_change_the_state_of_the_exercise(two, capfd):
    assert main(["90", "--file", str(exercises.Exercise("90").answer)]) == 0
    assert states(capfd)["90"] == "not started"


def test_all_exercises_are_checked_in_one_go(two, capfd):
    solve("90", two)
    assert main(["--all"]) == 1
    printed = capfd.readouterr().out
    titles = [f"{number} {exercises.Exercise(number).title}" for number in ("33", "90")]
    expected = [titles[0], "not started: ", titles[1], "right: "]
    places = [printed.index(text) for text in expected]
    assert places == sorted(places)
    assert printed.endswith("1 of 2 exercises are right\n")
    solve("33", two)
    assert main(["--all"]) == 0


def test_a_watched_file_is_checked_whenever_it_is_saved_until_it_is_right(two):
    file = two / "90_visible_devices.py"
    command = [sys.executable, BIN / "accel-demo", "check", "90", "--watch"]
    environment = environment_for({"PYTHONUNBUFFERED": "1"})
    with subprocess.Popen(
        command, cwd=two, env=environment, stdout=subprocess.PIPE, text=True
    ) as watching:
        try:
            assert watching.stdout is not None
            seen = []
            for line in watching.stdout:
                seen.append(line.split(":")[0].split(" ")[0].strip())
                if line.startswith("waiting") and "wrong" not in seen:
                    write_whole(file, "# nothing\n")
                elif line.startswith("waiting"):
                    file.unlink()  # as some editors do
                    time.sleep(0.5)
                    solve("90", two)
            assert watching.wait(60) == 0
        finally:
            watching.kill()
    firsts = [word for word in seen if word in ("not", "waiting", "wrong", "right")]
    assert firsts == ["not", "waiting", "wrong", "waiting", "right"]


def test_the_readme_shows_what_check_and_hint_print(course, capfd):
    text = (REPOSITORY / "README.md").read_text()
    [block] = re.findall(r"^```text\n(\$ accel-demo check .*?)^```", text, re.DOTALL | re.MULTILINE)
    wrong, hinted, right = re.split(r"^\$ .*\n", block, flags=re.MULTILINE)[1:]
    [file] = (course.folder / "tutorials" / "exercises").glob("23_*.py")
    file.write_text(wrong_answers("23")["loss_not_divided"].text)
    assert (main(["23"]), capfd.readouterr().out) == (1, wrong)
    assert (hint.main(["23"]), capfd.readouterr().out) == (0, hinted)
    solve("23", file.parent)
    assert (main(["23"]), capfd.readouterr().out) == (0, right)


def test_there_are_two_different_hints(capsys):
    hints = [
        hint.main(["90", *number]) == 0 and capsys.readouterr().out for number in ([], ["1"], ["2"])
    ]
    assert hints[0] == hints[1] != hints[2]
    assert hints[0].startswith("hint 1 of 2: ") and hints[2].startswith("hint 2 of 2: ")


def test_our_answer_is_shown_to_those_who_have_solved_the_exercise_or_give_up(two, capfd):
    ours = exercises.Exercise("90").answer.read_text()
    with pytest.raises(UserError, match="exercise 90 is not solved yet. Run `accel-demo check 90`"):
        answer.main(["90"])
    assert answer.main(["90", "--give-up"]) == 0
    assert capfd.readouterr().out == ours
    solve("90", two)
    assert main(["90"]) == 0
    (two / "90_visible_devices.py").write_text("# changed since\n")
    assert main(["90"]) == 1
    capfd.readouterr()
    assert answer.main(["90"]) == 0
    assert capfd.readouterr().out == ours


def test_a_reset_restores_the_exercise_and_keeps_every_version_of_the_learner(two, capsys):
    file = two / "90_visible_devices.py"
    original = file.read_bytes()
    for number in (1, 2):
        file.write_text(f"# version {number}\n")
        assert reset.main(["90"]) == 0
        assert file.read_bytes() == original
        assert file.with_name(f"{file.name}.{number}").read_text() == f"# version {number}\n"
    assert reset.main(["90"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{file.name} is already the original"
    assert len(list(two.glob("90_*"))) == 3
    file.unlink()
    assert reset.main(["90"]) == 0
    assert file.read_bytes() == original and len(list(two.glob("90_*"))) == 3


def next_exercise(capsys, *flags: str) -> str:
    assert next.main([*flags]) == 0
    [number] = re.findall(
        "^Then run `accel-demo check ([0-9]+)", capsys.readouterr().out, re.MULTILINE
    )
    return number


def test_next_follows_the_main_path_past_what_is_solved_or_skipped(course, capsys):
    assert next_exercise(capsys) == "10"
    assert next_exercise(capsys, "--skip") == "11"
    assert course.state(exercises.Exercise("10")) == "skipped"
    course.record(exercises.Exercise("11"), True, "")
    assert next_exercise(capsys) == "12"
    course.record(exercises.Exercise("12"), False, "")
    assert next_exercise(capsys) == "12"
    for number in ("12", "13", "20", "21", "22", "23", "30", "31", "34"):
        course.record(exercises.Exercise(number), True, "")
    assert next_exercise(capsys) == "40"
    course.record(exercises.Exercise("40"), True, "")
    assert next_exercise(capsys) == "24"  # by need, but it still has an exercise
    for number in exercises.all_exercises():
        course.record(exercises.Exercise(number), True, "")
    assert next.main([]) == 0
    assert "There is nothing left to do." in capsys.readouterr().out
    with pytest.raises(UserError, match="there is nothing to skip"):
        next.main(["--skip"])


def test_the_commands_work_in_all_folders_of_a_course_and_only_there(course, capsys, monkeypatch):
    monkeypatch.chdir(course.folder / "tutorials" / "exercises")
    assert main([]) == 0
    monkeypatch.chdir(course.folder.parent)
    for command in (main, next.main):
        with pytest.raises(UserError, match="the course is in course/. Run `cd course` first"):
            command([])
    monkeypatch.chdir("/")
    for command, arguments in ((main, ["90"]), (next.main, []), (reset.main, ["90"])):
        with pytest.raises(UserError, match="there is no course in this folder. Run `accel-demo"):
            command(arguments)


def test_a_missing_file_and_a_copy_beside_an_exercise_do_no_harm(two, capfd):
    shutil.copy(two / "90_visible_devices.py", two / "90_visible_devices copy.py")
    (two / "33_precision_setting.py").unlink()
    assert states(capfd) == {"33": "missing", "90": "not started"}
    assert main(["90"]) == 5
    with pytest.raises(UserError, match="33_precision_setting.py. Restore it with `accel-demo res"):
        main(["33"])
    assert main(["--all"]) == 1
    assert "missing: " in capfd.readouterr().out


@pytest.mark.parametrize("content", ["[]", "{", "folder"])
def test_a_damaged_result_is_reported_in_one_line(course, content):
    file = course.folder / STATE / "10.json"
    file.mkdir() if content == "folder" else file.write_text(content)
    for command in (next.main, main):
        with pytest.raises(UserError, match="10.json"):
            command([])


def test_init_updates_what_the_learner_has_not_edited(course, capsys):
    edited, old, missing, gone, kept = (
        course.folder / name for name in ("train.py", "README.md", "source", "gone.md", "kept.md")
    )
    edited.write_text("# mine\n")
    old.write_text("from an older version\n")
    shutil.rmtree(missing)
    gone.write_text("a page of an older version\n")
    kept.write_text("an edited page of an older version\n")
    file = course.folder / STATE / "written.json"
    written = json.loads(file.read_text())
    written |= {"train.py": "0" * 64, "README.md": digest_of(old)}
    written |= {"gone.md": digest_of(gone), "kept.md": "0" * 64}
    file.write_text(json.dumps(written))
    assert init.main([]) == 0
    printed = capsys.readouterr().out
    assert edited.read_text() == "# mine\n" and kept.exists() and not gone.exists()
    assert "    kept.md\n    train.py\nTo get a new version, rename your file" in printed
    assert "accel-demo next" in old.read_text() and missing.is_dir()
    assert init.main([str(course.folder)]) == 0
    assert "updated 0 files of the course" in capsys.readouterr().out


def test_init_writes_only_to_a_new_or_empty_folder(course, capsys, monkeypatch):
    with pytest.raises(UserError, match="tutorials is not empty. Choose a new folder"):
        init.main(["tutorials"])
    with pytest.raises(UserError, match=r"train.py/x.* \(Not a directory\)"):
        init.main(["train.py/x"])
    assert init.main(["my course"]) == 0
    assert "    cd 'my course'\n    accel-demo next\n" in capsys.readouterr().out
    empty = course.folder.parent / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    assert init.main(["."]) == 0
    assert "cd " not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (main, "99", "there is no exercise 99. Choose one of 10, 11, "),
        (main, "--watch", "--watch needs an exercise: accel-demo check 10 --watch"),
        (main, "--file x.py", "--file needs an exercise: accel-demo check 10 --file my_answer.py"),
        (main, "10 --all", "--all checks every exercise: leave out the number"),
        (main, "10 --file nothing.py", "there is no file nothing.py$"),
        (main, "10 --file README.md", "README.md must be a file with a name that ends in .py"),
        (hint.main, "10 3", "invalid choice: 3"),
        (hint.main, "", "the following arguments are required: NN"),
        (reset.main, "99", "there is no exercise 99"),
        (answer.main, "99", "there is no exercise 99"),
    ],
)
def test_bad_input_is_reported_in_one_line(course, command, arguments, message):
    with pytest.raises(UserError, match=message):
        command(arguments.split())


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
        command, cwd=tmp_path, env=environment, start_new_session=True, stderr=subprocess.DEVNULL
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
    (exercises.EXERCISES / "graders" / "90.py").write_text(GRADER.format(line))
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
    two, course, capfd, monkeypatch, line, code, state
):
    (two / "90_visible_devices.py").write_text("")
    (exercises.EXERCISES / "graders" / "90.py").write_text(GRADER.format(line))
    exercise = exercises.Exercise("90")
    course.record(exercise, True, digest_of(two / "90_visible_devices.py"))
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
    file.write_text(exercises.Exercise("90").original.read_text() if text is None else text)
    command = f"accel-demo check 90 --file {file} | head -c 0; exit ${{PIPESTATUS[0]}}"
    result = start(["bash", "-c", command], PYTHONUNBUFFERED=unbuffered)
    assert (result.returncode, result.stderr) == (code, "")
