"""Page 90: the GPU that `cuda:1` selects, and the exercise on CUDA_VISIBLE_DEVICES."""

import runpy

import pytest

from accel_demo.anatomy.devices import visible_devices
from tests.pages.pages import TUTORIALS, check, table_rows

ANSWER = TUTORIALS / "exercises" / "answers" / "90_visible_devices.py"
PAGE = "90_choosing_gpus.md"


def test_the_table_of_visible_devices_is_correct():
    seen = {row[0].strip("`"): row[1:4] for row in table_rows(PAGE, cells=5)}
    assert seen["0,4"] == ["2", "0", "4"]
    assert seen["0,9,4"] == seen["0,-1,4"] == ["1", "0", "none"]
    assert seen["4,0"] == ["2", "4", "0"]
    assert seen["not set"] == ["8", "0", "1"]
    for value in ("empty", "-1", "0,4,0"):
        assert seen[value] == ["0", "none", "none"]
    gpus = runpy.run_path(TUTORIALS / "90_choosing_gpus.py")["GPUS"]
    for value, (count, first, second) in seen.items():
        devices = visible_devices({"not set": None, "empty": ""}.get(value, value), gpus)
        assert count == str(len(devices))
        assert first == str(devices.get("cuda:0", "none"))
        assert second == str(devices.get("cuda:1", "none"))


def test_every_process_has_the_same_variable_and_a_different_device():
    for rank, gpu in enumerate([0, 4]):
        line = f"CUDA_VISIBLE_DEVICES=0,4: my device cuda:{rank} is physical GPU {gpu}"
        assert line in (TUTORIALS / PAGE).read_text().splitlines()


@pytest.mark.parametrize("folder", ["plain", "with a space"])
def test_the_model_answer_passes(start, tmp_path, folder):
    (tmp_path / folder).mkdir()
    result = check(start, "90", ANSWER, TMPDIR=str(tmp_path / folder))
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("right: ")


def test_the_unsolved_exercise_fails(start):
    result = check(start, "90")
    assert result.returncode == 1
    assert "wrong: an empty value hides all GPUs" in result.stdout


MISTAKES = {  # grader's message: (text in the model answer, replacement)
    "-1 matches no GPU, and hides all ids after it": ("            break", "            continue"),
    "a number that appears twice hides all GPUs": ("            return {}", "            continue"),
    "a prefix of two UUIDs matches no GPU": ("if len(matching) == 1", "if matching"),
    "a UUID may be shortened": ("uuid.startswith(written)", "uuid == written"),
    "cuda:N counts the visible GPUs from 0": ("cuda:{index}", "cuda:{gpu}"),
    "a value that starts with MIG- is passed on": ('startswith("MIG-")', 'startswith("MIGS-")'),
}


@pytest.mark.parametrize("said", MISTAKES)
def test_the_check_names_the_rule_that_an_answer_breaks(start, tmp_path, said):
    right, wrong = MISTAKES[said]
    text = ANSWER.read_text()
    assert right in text
    (tmp_path / "wrong.py").write_text(text.replace(right, wrong))
    result = check(start, "90", tmp_path / "wrong.py")
    assert result.returncode == 1
    assert result.stdout.startswith(f"wrong: {said}"), result.stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "import nothing_of_this_name\n",
            "the file cannot be used: ModuleNotFoundError: No module",
        ),
        ("import os\nos._exit(0)\n", "it ended early, with exit code 0\n"),
    ],
)
def test_the_check_reports_a_file_that_cannot_be_used(start, tmp_path, text, said):
    (tmp_path / "wrong.py").write_text(text)
    result = check(start, "90", tmp_path / "wrong.py")
    assert result.returncode == 1
    assert result.stdout.startswith(f"wrong: {said}")
