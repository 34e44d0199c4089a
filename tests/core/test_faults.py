"""A checkpoint is whole or absent, wherever its save is killed or fails."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from accel_demo.run.manifest import checkpoints_of, verify
from tests.conftest import REPOSITORY, launcher, run_all

HOW = ("by_hand", "accelerate")
SHORT = "--dataset synthetic --model tiny_cnn --epochs 1 --test-samples 50".split()


def cut_short(faults: dict[str, list[str]], folder, timeout: int) -> dict[str, dict]:
    """What tests/core/faulty_save.py found, by how the state is saved and by fault."""

    commands = []
    for how in HOW:
        (folder / how).mkdir()
        commands.append(["python", "tests/core/faulty_save.py", how, folder / how, *faults[how]])
    results = run_all(commands, timeout)
    assert [result.returncode for result in results] == [0, 0], results
    reports = {how: json.loads(one.stdout) for how, one in zip(HOW, results, strict=True)}
    assert [reports[how].pop("threads") for how in HOW] == [1, 1]
    return reports


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    faults = {
        "by_hand": ["kill/2", "ENOSPC/5", "EACCES/5", "size/5"],
        "accelerate": ["kill/4", "ENOSPC/8", "EACCES/8", "size/8"],
    }
    return cut_short(faults, tmp_path_factory.mktemp("faults"), timeout=120)


def check_whole(point: dict) -> None:
    """What was found is whole, loads as its step, and the next save leaves nothing else behind."""
    found = point["found"]
    assert point["damaged"] == [], point
    assert found == point["whole"][0] and found in (2, 3), point
    assert found == 3 or point["whole"] == [2, 1], point
    assert point["loaded"] == [found] * 4, point
    assert point["steps"] == [found, 4], point
    assert not [name for name in point["names"] if name.startswith(".")], point


def check_refused(point: dict, *reasons: str) -> None:
    message = point["message"]
    assert any(reason in message for reason in reasons) and "\n" not in message, point
    if "/checkpoints cannot be read (" not in message:
        assert message.startswith("cannot write to "), point
        assert message.endswith("go on from the last checkpoint with --resume auto"), point


@pytest.mark.parametrize("how", HOW)
def test_a_killed_save_leaves_the_last_checkpoint_or_the_new_one(how, reports):
    points = reports[how]["kill"]
    assert len(points) > {"by_hand": 30, "accelerate": 15}[how]  # how many depends on the version
    for point in points:
        assert (point["ended"], point["signal"]) == ("killed", signal.SIGKILL)
        check_whole(point)
    assert {point["found"] for point in points} == {2, 3}


@pytest.mark.parametrize("fault", ["ENOSPC", "EACCES"])
@pytest.mark.parametrize("how", HOW)
def test_a_save_that_fails_says_why_and_leaves_the_last_checkpoint(how, fault, reports):
    points = reports[how][fault]
    refused = [point for point in points if point["ended"] == "refused"]
    assert len(refused) > {"by_hand": 7, "accelerate": 3}[how]
    for point in points:
        check_whole(point)
        if point in refused:  # makedirs tries once more where it could not look
            looked = point["at"] == "posix.stat"
            check_refused(
                point, os.strerror(getattr(errno, fault)), "File exists" if looked else "-"
            )
        else:  # the call was one that may fail, so the checkpoint is there
            assert (point["ended"], point["found"]) == ("saved", 3), point


@pytest.mark.parametrize("how", HOW)
def test_a_file_that_may_not_grow_fails_the_save_inside_torch_and_safetensors(how, reports):
    *points, largest = reports[how]["size"]
    assert len(points) >= {"by_hand": 6, "accelerate": 4}[how]
    for point in points:
        assert point["ended"] == "refused", point
        check_whole(point)
        torch_says = ["iostream error", "unexpected pos"] if point["limit"] >= 2**16 else []
        check_refused(point, os.strerror(errno.EFBIG), *torch_says)
    check_whole(largest)


@pytest.mark.slow
def test_no_point_of_a_save_leaves_a_damaged_checkpoint(tmp_path):
    faults = dict.fromkeys(HOW, ["kill/1", "ENOSPC/1", "EACCES/1", "size/1"])
    points = [
        point
        for report in cut_short(faults, tmp_path, timeout=220).values()
        for points in report.values()
        for point in points
    ]
    assert len(points) > 500
    for point in points:
        check_whole(point)


@pytest.mark.skipif(not shutil.which("prlimit"), reason="needs prlimit, of util-linux")
@pytest.mark.parametrize("most", [100, 700])  # bytes: environment.json is larger; the metrics
def test_what_cannot_be_written_beside_the_checkpoints_is_one_line_too(most, tmp_path):
    command = ["prlimit", f"--fsize={most}", sys.executable, "accel_demo/train_plain.py", *SHORT]
    command += ["--log-every", "1", "--run-dir", tmp_path / "run"]
    result = subprocess.run(  # through pipes: the limit would hold for a file with its output, too
        command, capture_output=True, text=True, timeout=120, cwd=REPOSITORY
    )
    assert result.returncode == 2 and result.stderr.count("error: ") == 1, result.stderr
    assert os.strerror(errno.EFBIG) in result.stderr and "Traceback" not in result.stderr


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of 1 MiB."""
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path]
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("only root may mount a disk")
    subprocess.run(command, check=True)
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


COMMANDS = {
    "train_plain.py": ["python", "accel_demo/train_plain.py"],
    "train_ddp.py": ["python", "accel_demo/train_ddp.py", "--nproc", 2],
    "train.py": [*launcher("train.py", 2), "accel_demo/train.py"],
}


@pytest.mark.system
@pytest.mark.parametrize("file", COMMANDS)
def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(file, small_disk, start):
    run = small_disk / "run"
    flags = [*SHORT, "--checkpoint-every", 1, "--keep-last", 50, "--run-dir", run]
    result = start([*COMMANDS[file], *flags])
    assert result.returncode == (1 if file == "train.py" else 2)  # the launcher's own
    assert "(No space left on device), so the training stops" in result.stderr
    assert result.stderr.count("error: ") == 1, result.stderr
    assert f'accel_demo/{file}", line' not in result.stderr
    environment = json.loads((run / "environment.json").read_text())
    assert environment["processes"] == (1 if file == "train_plain.py" else 2)
    steps = [verify(path)["step"] for path in checkpoints_of(run)]
    assert len(steps) > 2 and steps == [*range(len(steps), 0, -1)]
    assert len(list((run / "checkpoints").iterdir())) == len(steps)

    subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
    result = start([*COMMANDS[file], *flags, "--resume", "auto"])
    assert result.returncode == 0, result.stderr
    assert f"after step {steps[0]}\n" in result.stdout and "done: " in result.stdout


@pytest.mark.system
@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace: apt-get install strace")
def test_no_system_call_of_a_save_leaves_a_damaged_checkpoint(tmp_path):
    faults = {"by_hand": ["strace/1"], "accelerate": ["strace/3"]}
    reports = cut_short(faults, tmp_path, timeout=180)
    points = [point for report in reports.values() for point in report["strace"]]
    assert len(points) > 300
    for point in points:
        check_whole(point)
        assert ("SIGKILL" in point["strace"]) == (point["ended"] == "killed"), point
        if point["ended"] == "refused":
            check_refused(point, "")
        elif point["ended"] == "saved":
            assert point["found"] == 3, point
    assert {"killed", "refused", "saved"} == {point["ended"] for point in points}
