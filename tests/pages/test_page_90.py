"""Page 90: the GPU that `cuda:1` selects, and the exercise on CUDA_VISIBLE_DEVICES."""

import random
import runpy

from accel_demo.anatomy.devices import visible_devices
from tests.pages.pages import TUTORIALS, check, load_grader, table_rows

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


def test_the_check_works_in_a_folder_with_a_space_in_its_name(start, tmp_path):
    (tmp_path / "with a space").mkdir()
    result = check(start, "90", ANSWER, TMPDIR=str(tmp_path / "with a space"))
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("right: ")


def test_the_random_values_are_fixed_and_contain_no_rare_cases():
    grader = load_grader("90")
    cases = grader.random_cases(random.Random(grader.SEED))
    assert cases == grader.random_cases(random.Random(grader.SEED))
    assert len(cases) == grader.RANDOM_VALUES
    for _, _, value, uuids in cases:
        ids = value.split(",")
        gpus = [gpu for one in ids for gpu in visible_devices(one, uuids).values()]
        assert len(gpus) == len(set(gpus)) >= len(ids) - 1  # at most one id is invalid
        assert len({one.startswith("GPU-") for one in ids}) == 1
