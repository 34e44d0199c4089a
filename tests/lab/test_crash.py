"""Test `accel-demo crash`, which compares a repeatedly killed run with an uninterrupted run."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from accel_demo.errors import UserError
from accel_demo.lab.course.folder import Course
from accel_demo.lab.crash import command as crash
from accel_demo.lab.crash import tables
from accel_demo.lab.crash.result import CrashResult, Kill, LaunchResult, compare
from tests.conftest import BIN, REPOSITORY, left_behind, processes_below_this_one
from tests.lab.measured import run_measured


def crash_and_check(folder, kills: int, processes: int, *flags, timeout=240) -> dict:
    """Run the command, check that nothing was lost, and return its JSON."""
    command = f"crash --kills {kills} --processes {processes}"
    ran = run_measured(folder, command, *flags, timeout=timeout)
    result, output = ran.json, ran.stdout
    launches, steps = result["launches"], result["steps"]
    assert [launch["kill"] is not None for launch in launches] == [True] * kills + [False]
    assert f"kills: {kills} (" in output
    connected = sum(launch["has_connected"] for launch in launches)
    assert f"connected: {processes} process" in output and connected >= 1
    assert f" in {connected} of {kills + 1} launches" in output
    assert "damaged checkpoints used: 0\n" in output and " 0 damaged" in output
    assert f"metrics: equal in {steps} of {steps} steps\n" in output
    assert "final weights: bitwise equal in all 20 tensors" in output
    trained = sum(len(launch["points"]) for launch in launches)
    assert trained - sum(launch["replayed_steps"] for launch in launches) == steps
    assert f"launch {kills + 1}: resumed after step " in output
    assert f"<!-- last step: {steps} -->" in ran.picture
    return result


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_three_kills_do_not_change_a_single_bit(processes, tmp_path):
    crash_and_check(tmp_path, 3, processes, "--seed", 3)


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("processes", [1, 2])
def test_twenty_kills_do_not_change_a_single_bit(processes, tmp_path):
    result = crash_and_check(tmp_path, 20, processes, "--seed", 1, timeout=900)
    phases = {row["kill"]["actual_phase"] for row in result["launches"] if row["kill"]}
    assert phases == {"save", "step", "start-up"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_kills_of_raw_ddp_do_not_change_a_single_bit(tmp_path):
    crash_and_check(tmp_path, 3, 2, "--script", "train_ddp")


def test_the_kills_are_spread_over_the_run_and_all_phases():
    kills = crash.plan(20, 2, seed=5, total_steps=120)
    assert kills == crash.plan(20, 2, seed=5, total_steps=120)
    assert kills != crash.plan(20, 2, seed=6, total_steps=120)
    phases = [kill.planned_phase for kill in kills]
    assert (phases.count("save"), phases.count("step"), phases.count("start-up")) == (8, 8, 4)
    assert {kill.rank for kill in kills} == {0, 1}
    steps = [kill.step for kill in kills if kill.planned_phase != "start-up"]
    assert steps == sorted(steps) and steps[0] < 120 / 16 and 100 < steps[-1] < 120 - 6


LAUNCH = LaunchResult(
    started_at=0.0,
    has_connected=True,
    resumed_after_step=0,
    resumed_from=None,
    used_newest_checkpoint=True,
    used_damaged_checkpoint=False,
    points=[(1.0, 1), (2.0, 2), (3.0, 3)],
    replayed_steps=0,
    kill=None,
    complete_checkpoints=[],
    damaged_checkpoints=[],
    left_unfinished_checkpoint=False,
)


@pytest.fixture
def runs(tmp_path):
    """The folders of two finished runs with bitwise equal weights and metrics."""
    for name in ("uninterrupted", "killed"):
        (tmp_path / name).mkdir()
        weights = {"weight": torch.arange(6.0).reshape(2, 3), "count": torch.tensor(3)}
        save_file(weights, tmp_path / name / "model.safetensors")
        metrics = [{"step": step, "train_loss": 1 / step} for step in (1, 2, 3)]
        metrics[0]["images_per_second"] = len(name)  # the speed may differ
        lines = [json.dumps(line) + "\n" for line in [*metrics, {"step": 3, "test_loss": 0.5}]]
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
    return tmp_path / "uninterrupted", tmp_path / "killed"


def result_of(runs, launch=LAUNCH) -> CrashResult:
    return CrashResult("train", 1, 0, 3, {}, LAUNCH.points, [launch], compare(*runs))


def test_two_equal_runs_pass(runs):
    result = result_of(runs)
    assert (result.comparison.tensors, result.comparison.different_tensors) == (2, [])
    assert (result.comparison.logged_steps, result.comparison.equal_logged_steps) == (3, 3)
    assert result.passed


def test_one_flipped_bit_does_not_pass(runs):
    path = runs[1] / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 128  # flips the sign of the last number
    path.write_bytes(content)
    result = result_of(runs)
    assert len(result.comparison.different_tensors) == 1
    assert not result.passed


def test_a_step_with_a_different_loss_or_without_a_metrics_line_does_not_pass(runs):
    path = runs[1] / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    for wrong in (lines[1:], [*lines[:2], lines[2].replace("0.33", "0.34"), lines[3]]):
        path.write_text("".join(wrong))
        result = result_of(runs)
        assert result.comparison.logged_steps == 3 > result.comparison.equal_logged_steps
        assert not result.passed


@pytest.mark.parametrize(
    "wrong", [{"used_damaged_checkpoint": True}, {"used_newest_checkpoint": False}]
)
def test_a_launch_that_uses_the_wrong_checkpoint_does_not_pass(wrong, runs):
    assert not result_of(runs, replace(LAUNCH, **wrong)).passed


def test_a_launch_is_described_in_one_sentence():
    kill = Kill("save", rank=0, step=12, fraction=0.5, actual_phase="save", seconds=3.0)
    launch = replace(LAUNCH, resumed_after_step=9, points=[(2.5, 14)], replayed_steps=1, kill=kill)
    words = "resumed after step 9, reached step 14 (1 step replayed), then killed rank 0"
    assert tables.sentence(3, launch) == f"launch 3: {words} during a save"
    missed = replace(launch, kill=replace(kill, actual_phase="step"))
    assert tables.sentence(3, missed).endswith(" in a step (planned: during a save)")
    early = replace(LAUNCH, resumed_after_step=None, points=[], kill=kill)
    assert tables.sentence(1, early) == "launch 1: killed rank 0 during a save"
    expected = "launch 2: started from the beginning, reached step 3, then finished"
    assert tables.sentence(2, LAUNCH) == expected


def test_the_exit_code_is_0_only_if_the_runs_are_equal(monkeypatch):
    monkeypatch.setattr(tables, "summary", lambda result: "")
    for passed in (True, False):
        result = SimpleNamespace(passed=passed)
        monkeypatch.setattr(crash, "crash", lambda *arguments, result=result: result)
        assert crash.main(["--kills", "1"]) == (0 if passed else 1)


def test_missing_matplotlib_is_reported(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install matplotlib"):
        crash.main(["--plot", "steps.png"])


def test_the_train_file_of_a_course_is_killed_if_there_is_one(monkeypatch, tmp_path):
    monkeypatch.chdir(REPOSITORY)
    config = "accelerate_configs/cpu.yaml"
    launcher = ["accelerate", "launch", "--config_file"]
    assert crash.launch_command("train", 1) == [*launcher, config, "accel_demo/train.py"]
    monkeypatch.chdir(tmp_path)
    assert crash.launch_command("train_ddp", 2)[-1] == str(REPOSITORY / "accel_demo/train_ddp.py")
    Course(tmp_path).update()
    assert crash.launch_command("train", 1) == [*launcher, config, "train.py"]
    assert Path("train.py").is_file() and Path(config).is_file()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot send SIGINT to one process")
def test_ctrl_c_stops_every_process_and_leaves_no_folder(tmp_path):
    before = processes_below_this_one()
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [BIN / "accel-demo", "crash", "--kills", "1"]
    tool = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 60
        while len(processes_below_this_one() - before) < 3:  # the tool, the launcher and a rank
            assert time.monotonic() < deadline and tool.poll() is None
            time.sleep(0.1)
        tool.send_signal(signal.SIGINT)
        _, stderr = tool.communicate(timeout=30)
        assert stderr == b"\ninterrupted: all processes were stopped\n"
        assert tool.returncode == 130
    finally:
        tool.kill()
        orphans = left_behind(before)
    assert not orphans and not list(tmp_path.glob("accel-demo-crash-*"))
