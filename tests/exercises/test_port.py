"""Test the old script of exercise 91, and what its grader records."""

import ast
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from accel_demo.lab.course.exercises import all_exercises
from accel_demo.processes.environment import environment_for
from tests.conftest import BIN, REPOSITORY
from tests.pages.pages import EXERCISES, check, load_grader

EXERCISE = all_exercises()["91"]
GRADERS = EXERCISES / "graders"


@pytest.fixture
def grader(monkeypatch):
    monkeypatch.syspath_prepend(GRADERS)
    return load_grader("91")


def without_docstring(text: str) -> str:
    docstring = ast.parse(text).body[0]
    return "\n".join(text.splitlines()[docstring.end_lineno :])


def test_the_exercise_starts_with_the_old_script(grader):
    stub, old = EXERCISE.original.read_text(), grader.OLD_SCRIPT.read_text()
    assert without_docstring(stub) == without_docstring(old)
    assert grader.changed_lines(old, stub) == 0


def test_the_docstring_states_what_the_grader_allows(grader):
    docstring = ast.get_docstring(ast.parse(EXERCISE.original.read_text())) or ""
    docstring = " ".join(docstring.split())
    assert f"At most {grader.MOST_CHANGES} lines differ" in docstring
    assert f"each of the {grader.TEST} test images" in docstring
    assert f"up to {grader.TOLERANCE:.0e}".replace("e-04", "e-4") in docstring
    assert grader.recorder_91.LINE.search(docstring)


def test_our_answer_changes_far_fewer_lines_than_the_exercise_allows(grader):
    old, ours = grader.OLD_SCRIPT.read_text(), EXERCISE.answer.read_text()
    assert grader.changed_lines(old, ours) < 0.7 * grader.MOST_CHANGES
    rewritten = len(grader.code_lines(old)) + len(grader.code_lines(ours))
    assert rewritten > grader.MOST_CHANGES


@pytest.mark.parametrize(
    ("new", "changes"),
    [
        ("import os\nx = 1\ny = 2\n", 0),
        ("# comment\nx = 1\n\n\ny = 2\n", 0),
        ('"""Docstring\nin two lines."""\nx = 1\ny = 2\n', 0),
        ("if True:\n    x = 1\n    y = 2\n", 1),
        ("x = 1\ny = 3\n", 2),
        ("x = 1\n", 1),
    ],
)
def test_only_added_and_removed_code_counts_as_a_change(grader, new, changes):
    assert grader.changed_lines("import sys\nx = 1\ny = 2\n", new) == changes


def test_the_training_images_differ_so_that_the_grader_can_recognize_them(grader):
    assert len(grader.image_numbers()) == grader.TRAIN


WRITES = """import json, os, sys
from pathlib import Path

import recorder_91

folder, files = Path(sys.argv[1]), []
recorder_91.record_files(folder, files)

import safetensors.torch
import torch
from accelerate import Accelerator

tensors = {"x": torch.zeros(2)}
torch.save(tensors, folder / "saved")
torch.save(tensors, f=str(folder / "saved_by_keyword"))
with open(folder / "opened", "wb") as file:
    torch.save(tensors, file)
safetensors.torch.save_file(tensors, folder / "safe")
(folder / "path").write_bytes(b"")
os.chdir(folder)
os.replace("path", "replaced")
(folder / "saved").rename(folder / "renamed")
accelerator = Accelerator(cpu=True)
accelerator.prepare(torch.nn.Linear(1, 1))
accelerator.save_state(folder / "state")
Path("opened").read_bytes()
Path(sys.argv[2]).write_text(json.dumps(files))
"""


def test_every_way_to_write_a_file_is_recorded(start, tmp_path):
    folder, result = tmp_path / "folder", tmp_path / "files.json"
    folder.mkdir()
    command = ["python", "-c", WRITES, folder, result]
    path = f"{GRADERS}:{REPOSITORY}"
    written = start(command, PYTHONPATH=path)
    assert written.returncode == 0, written.stderr
    files = set(json.loads(result.read_text()))
    assert files >= {"saved", "saved_by_keyword", "opened", "safe", "path", "replaced", "renamed"}
    assert files >= {"state/model.safetensors", "state/random_states_0.pkl"}
    assert not any(name.startswith("..") for name in files)


@pytest.mark.slow
def test_the_check_works_in_another_working_directory(start, tmp_path):
    (tmp_path / "my port.py").write_text(EXERCISE.answer.read_text())
    result = check(start, "91", "my port.py", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, ""), result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["my port.py"]


# A port that survives Ctrl-C. Each process writes its ID to a file.
STUBBORN = """import os, pathlib, time
pathlib.Path(os.environ["PID_FOLDER"], str(os.getpid())).touch()
while True:
    try:
        time.sleep(60)
    except BaseException:
        pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_check_of_a_port_leaves_no_process(tmp_path, number):
    port, pids = tmp_path / "port.py", tmp_path / "pids"
    port.write_text(STUBBORN)
    pids.mkdir()
    command = [sys.executable, BIN / "accel-demo", "check", "91", "--file", port]
    environment = environment_for({"PID_FOLDER": str(pids)})
    checked = subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, start_new_session=True, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 90
        while len(list(pids.iterdir())) < 4:  # two launches with two processes each
            assert time.monotonic() < deadline
            time.sleep(0.05)
        processes = [psutil.Process(int(path.name)) for path in Path(pids).iterdir()]
        checked.send_signal(number)
        assert checked.wait(60) == 128 + number
        assert not psutil.wait_procs(processes, 30)[1]
    finally:
        checked.kill()
