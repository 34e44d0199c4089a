"""Test that a save that fails or is killed at any point leaves no incomplete checkpoint."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess

import pytest

from accel_demo import train_plain
from accel_demo.config import CommandLine
from accel_demo.errors import one_line_errors
from accel_demo.run.manifest import checkpoints_of, verify
from tests.conftest import launcher, run_all
from tests.runs import read

METHODS = ("by_hand", "accelerate")
SHORT = "--dataset synthetic --model tiny_cnn --epochs 1 --test-samples 50".split()


def interrupt_saves(faults: dict[str, list[str]], folder, timeout: int) -> dict[str, dict]:
    """Run faulty_save.py for both save methods. Return the reports, keyed by method and fault."""
    for method in METHODS:
        (folder / method).mkdir()
    program = "tests/core/faulty_save.py"
    commands = [["python", program, name, folder / name, *faults[name]] for name in METHODS]
    results = run_all(commands, timeout)
    assert [result.returncode for result in results] == [0, 0], results
    reports = {
        name: json.loads(result.stdout) for name, result in zip(METHODS, results, strict=True)
    }
    assert [report.pop("threads") for report in reports.values()] == [1, 1]
    return reports


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    faults = {
        "by_hand": ["kill/4", "ENOSPC/10", "EACCES/10", "size/10"],
        "accelerate": ["kill/8", "ENOSPC/16", "EACCES/16", "size/16"],
    }
    return interrupt_saves(faults, tmp_path_factory.mktemp("faults"), timeout=120)


def check_complete(point: dict) -> None:
    """Check that resuming loads a complete checkpoint, and that the next save removes leftovers."""
    resumed = point["resumed"]
    assert point["damaged"] == [], point
    assert resumed == point["complete"][0] and resumed in (2, 3), point
    assert resumed == 3 or point["complete"] == [2, 1], point
    assert point["loaded"] == [resumed] * 4, point
    assert point["steps"] == [resumed, 4], point
    assert not [name for name in point["names"] if name.startswith(".")], point


def check_refused(point: dict, *reasons: str) -> None:
    message = point["message"]
    assert any(reason in message for reason in reasons) and "\n" not in message, point
    if "/checkpoints cannot be read (" not in message:
        assert message.startswith("cannot write to "), point
        assert message.endswith("Fix this, then continue with --resume auto."), point


@pytest.mark.parametrize("method", METHODS)
def test_a_killed_save_leaves_the_last_checkpoint_or_the_new_one(method, reports):
    points = reports[method]["kill"]
    assert len(points) > {"by_hand": 15, "accelerate": 7}[method]  # varies by library version
    for point in points:
        assert (point["ended"], point["signal"]) == ("killed", signal.SIGKILL)
        check_complete(point)
    assert {point["resumed"] for point in points} == {2, 3}


@pytest.mark.parametrize("fault", ["ENOSPC", "EACCES"])
@pytest.mark.parametrize("method", METHODS)
def test_a_failed_save_prints_the_reason_and_leaves_the_last_checkpoint(method, fault, reports):
    points = reports[method][fault]
    refused = [point for point in points if point["ended"] == "refused"]
    assert len(refused) > {"by_hand": 3, "accelerate": 1}[method]
    for point in points:
        check_complete(point)
        if point in refused:  # if stat fails, makedirs raises FileExistsError
            stat_failed = point["at"] == "posix.stat"
            check_refused(
                point, os.strerror(getattr(errno, fault)), "File exists" if stat_failed else "-"
            )
        else:  # the save succeeds without this call
            assert (point["ended"], point["resumed"]) == ("saved", 3), point


@pytest.mark.parametrize("method", METHODS)
def test_a_file_size_limit_makes_saves_by_torch_and_safetensors_fail_cleanly(method, reports):
    *points, largest = reports[method]["size"]
    assert len(points) >= {"by_hand": 3, "accelerate": 2}[method]
    for point in points:
        assert point["ended"] == "refused", point
        check_complete(point)
        torch_messages = ["iostream error", "unexpected pos"] if point["limit"] >= 2**16 else []
        check_refused(point, os.strerror(errno.EFBIG), *torch_messages)
    check_complete(largest)


@pytest.mark.slow
def test_an_interruption_at_any_point_of_a_save_leaves_no_damaged_checkpoint(tmp_path):
    faults = dict.fromkeys(METHODS, ["kill/1", "ENOSPC/1", "EACCES/1", "size/1"])
    points = [
        point
        for report in interrupt_saves(faults, tmp_path, timeout=220).values()
        for points in report.values()
        for point in points
    ]
    assert len(points) > 500
    for point in points:
        check_complete(point)


@pytest.mark.parametrize("limit", [100, 700])  # bytes; some files of a run are larger
def test_a_failed_write_outside_the_checkpoints_prints_one_line(limit, tmp_path, capsys):
    config, _ = CommandLine("").read(
        [*SHORT, "--log-every", "1", "--run-dir", str(tmp_path / "run")]
    )
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, usual[1]))
    try:
        with pytest.raises(SystemExit) as stopped, one_line_errors():
            train_plain.main(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("error: ") == 1, error
    assert os.strerror(errno.EFBIG) in error


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system with a capacity of 1 MiB."""
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path]
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
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
def test_a_full_disk_prints_one_line_and_the_run_resumes_with_more_space(file, small_disk, start):
    run = small_disk / "run"
    flags = [*SHORT, "--checkpoint-every", 1, "--keep-last", 50, "--run-dir", run]
    result = start([*COMMANDS[file], *flags])
    assert result.returncode == (1 if file == "train.py" else 2)  # the launcher exits with code 1
    assert "(No space left on device). Fix this, then continue with" in result.stderr
    assert result.stderr.count("error: ") == 1, result.stderr
    assert f'accel_demo/{file}", line' not in result.stderr
    assert read(run / "environment.json")["processes"] == (1 if file == "train_plain.py" else 2)
    steps = [verify(path)["step"] for path in checkpoints_of(run)]
    assert len(steps) > 2 and steps == [*range(len(steps), 0, -1)]
    assert len(list((run / "checkpoints").iterdir())) == len(steps)

    subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
    result = start([*COMMANDS[file], *flags, "--resume", "auto"])
    assert result.returncode == 0, result.stderr
    assert f"after step {steps[0]}\n" in result.stdout and "done: " in result.stdout


@pytest.mark.system
@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace: apt-get install strace")
def test_an_interruption_at_any_system_call_leaves_no_damaged_checkpoint(tmp_path):
    faults = {"by_hand": ["strace/1"], "accelerate": ["strace/3"]}
    reports = interrupt_saves(faults, tmp_path, timeout=180)
    points = [point for report in reports.values() for point in report["strace"]]
    assert len(points) > 300
    for point in points:
        check_complete(point)
        assert ("SIGKILL" in point["strace"]) == (point["ended"] == "killed"), point
        if point["ended"] == "refused":
            check_refused(point, "")
        elif point["ended"] == "saved":
            assert point["resumed"] == 3, point
    assert {"killed", "refused", "saved"} == {point["ended"] for point in points}
