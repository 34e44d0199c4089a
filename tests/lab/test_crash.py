"""A training that is killed again and again ends with the weights of one that is not."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import save_file

from accel_demo.errors import UserError
from accel_demo.lab import timed_command
from accel_demo.lab.crash import command as crash
from accel_demo.lab.crash import report
from tests.conftest import BIN, REPOSITORY, left_behind, processes_below_this_one


def crash_and_check(start, tmp_path, kills: int, processes: int, *flags, timeout=240) -> dict:
    """Run the command, which must find everything in order; gives what it wrote as JSON."""
    found_file, plot = tmp_path / "found.json", tmp_path / "steps.png"
    command = ["accel-demo", "crash", "--kills", kills, "--processes", processes, *flags]
    result = start([*command, "--json", found_file, "--plot", plot], timeout=timeout)
    said = result.stdout
    assert result.returncode == 0, said + result.stderr
    found = json.loads(found_file.read_text())
    rows = found["launches"]
    assert [row["kill"] is not None for row in rows] == [True] * kills + [False]
    assert f"kills:             {kills}: " in said
    connected = sum(row["connected"] for row in rows)
    assert f"connected:         {processes} process" in said and connected >= 1
    assert f" in {connected} of {kills + 1} launches" in said
    assert "damaged ones used: 0\n" in said and " 0 damaged" in said
    assert f"metrics:           equal in {found['steps']} of {found['steps']} steps\n" in said
    assert "final weights:     bitwise equal (20 tensors)" in said
    assert sum(row["trained"] - row["replayed"] for row in rows) == found["steps"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    return found


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_three_kills_do_not_change_a_bit(processes, start, tmp_path):
    crash_and_check(start, tmp_path, 3, processes, "--seed", 3)


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("processes", [1, 2])
def test_twenty_kills_do_not_change_a_bit(processes, start, tmp_path):
    found = crash_and_check(start, tmp_path, 20, processes, "--seed", 1, timeout=900)
    hits = [row["kill"]["hit"] for row in found["launches"] if row["kill"]]
    assert set(hits) == {"save", "step", "start-up"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_raw_ddp_loses_nothing_either(start, tmp_path):
    crash_and_check(start, tmp_path, 3, 2, "--telling", "train_ddp")


def test_the_kills_are_spread_over_the_training_and_of_all_kinds():
    kills = crash.plan(20, 2, seed=5, total_steps=120)
    assert kills == crash.plan(20, 2, seed=5, total_steps=120)
    assert kills != crash.plan(20, 2, seed=6, total_steps=120)
    kinds = [kill.kind for kill in kills]
    assert (kinds.count("save"), kinds.count("step"), kinds.count("start-up")) == (8, 8, 4)
    assert {kill.rank for kill in kills} == {0, 1}
    steps = [kill.step for kill in kills if kill.kind != "start-up"]
    assert steps == sorted(steps) and steps[0] < 120 / 16 and 100 < steps[-1] < 120 - 6


@pytest.fixture
def runs(tmp_path):
    """Two finished runs that are alike to the last bit, and what `crash` would find."""
    for name in ("twin", "killed"):
        (tmp_path / name).mkdir()
        weights = {"weight": torch.arange(6.0).reshape(2, 3), "count": torch.tensor(3)}
        save_file(weights, tmp_path / name / "model.safetensors")
        metrics = [{"step": step, "train_loss": 1 / step} for step in (1, 2, 3)]
        metrics[0]["images_per_second"] = len(name)  # speed may differ
        lines = [json.dumps(line) + "\n" for line in [*metrics, {"step": 3, "test_loss": 0.5}]]
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
    right = {"from_the_newest_whole": True, "from_a_damaged": False}
    return tmp_path / "twin", tmp_path / "killed", {"launches": [right]}


def test_two_runs_that_are_alike_pass(runs):
    twin, killed, found = runs
    found |= report.compare(twin, killed)
    assert (found["tensors"], found["different_tensors"]) == (2, [])
    assert (found["steps_logged"], found["steps_logged_alike"]) == (3, 3)
    assert report.passed(found)


def test_one_flipped_bit_does_not_pass(runs):
    twin, killed, found = runs
    path = killed / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 128  # the sign of the last tensor's last number
    path.write_bytes(content)
    found |= report.compare(twin, killed)
    assert len(found["different_tensors"]) == 1
    assert not report.passed(found)


def test_a_step_with_another_loss_or_without_a_line_does_not_pass(runs):
    twin, killed, found = runs
    path = killed / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    for wrong in (lines[1:], [*lines[:2], lines[2].replace("0.33", "0.34"), lines[3]]):
        path.write_text("".join(wrong))
        compared = report.compare(twin, killed)
        assert compared["steps_logged"] == 3 > compared["steps_logged_alike"]
        assert not report.passed(found | compared)


@pytest.mark.parametrize(
    ("fact", "wrong"), [("from_a_damaged", True), ("from_the_newest_whole", False)]
)
def test_a_launch_from_the_wrong_checkpoint_does_not_pass(fact, wrong, runs):
    twin, killed, found = runs
    found["launches"][0][fact] = wrong
    assert not report.passed(found | report.compare(twin, killed))


def test_a_verdict_that_is_not_equal_is_exit_code_1(monkeypatch):
    monkeypatch.setattr(crash, "crash", lambda options, folder: {})
    monkeypatch.setattr(report, "summary", lambda found: "")
    for verdict in (True, False):
        monkeypatch.setattr(report, "passed", lambda found, verdict=verdict: verdict)
        assert crash.main(["--kills", "1"]) == (0 if verdict else 1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--kills 0", "--kills must be at least 1, got 0"),
        ("--kills many", "argument --kills: invalid int value: 'many'"),
        ("--processes 0", "--processes must be at least 1, got 0"),
        ("--processes 3", "choose --processes 1 or 2, or --telling train_ddp"),
        ("--telling train_plain", "argument --telling: invalid choice"),
        ("--plot /proc/nowhere/steps.png", "cannot write --plot /proc/nowhere/steps.png: No such"),
        ("--plot steps.gif", "--plot takes a .png, .svg or .pdf file, got steps.gif"),
        ("--json /proc/nowhere/found.json", "cannot write --json /proc/nowhere/found.json: No suc"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(flags, message, monkeypatch):
    monkeypatch.setattr(crash, "crash", None)  # calling it would fail
    with pytest.raises(UserError) as mistake:
        crash.main(flags.split())
    assert message in str(mistake.value) and "\n" not in str(mistake.value)


def test_without_matplotlib_or_a_clone_it_says_what_is_missing(monkeypatch, tmp_path):
    with monkeypatch.context() as without, pytest.raises(UserError, match="pip install matplotlib"):
        without.setattr("importlib.util.find_spec", lambda name: None)
        crash.main(["--plot", "steps.png"])
    monkeypatch.setattr(timed_command, "REPOSITORY", tmp_path)
    for telling in ("train", "train_ddp"):
        with pytest.raises(UserError, match="cpu.yaml is missing: .*run this in a clone"):
            crash.main(["--telling", telling])


def test_a_mistake_is_one_line_and_exit_code_2(start):
    result = start(["accel-demo", "crash", "--processes", "3"])
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for one process")
def test_ctrl_c_stops_all_it_has_started_and_leaves_no_folder(tmp_path):
    before = processes_below_this_one()
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [BIN / "accel-demo", "crash", "--kills", "1"]
    tool = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 60
        while len(processes_below_this_one() - before) < 3:  # the tool, the launcher, a rank
            assert time.monotonic() < deadline and tool.poll() is None
            time.sleep(0.1)
        tool.send_signal(signal.SIGINT)
        _, stderr = tool.communicate(timeout=30)
        assert stderr == b"\nstopped, and everything it had started\n"
        assert tool.returncode == 130
    finally:
        tool.kill()
        orphans = left_behind(before)
    assert not orphans and not list(tmp_path.glob("accel-demo-crash-*"))
