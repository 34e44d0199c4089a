"""Test runs that are started without a config file, or with `spawn` instead of torchrun."""

import os

import pytest
import torch

from accel_demo.processes import devices
from tests.conftest import GPUS, REPOSITORY, VISIBLE_GPUS
from tests.runs import read, same_weights

SHORT = "--dataset synthetic --max-steps 6 --accumulate 2 --dropout 0.5 --augment".split()


def test_spawn_trains_to_the_same_weights_as_torchrun(train, start, tmp_path):
    runs = [train("train_ddp.py", *SHORT, processes=2)]
    for method in (None, "spawn"):  # None stands for the platform's default
        runs.append(tmp_path / f"{method}")
        command = ["python", "accel_demo/train_ddp.py", "--nproc", 2, *SHORT]
        result = start([*command, "--run-dir", runs[-1]], ACCEL_DEMO_START_METHOD=method)
        assert result.returncode == 0, result.stderr
        environment = read(runs[-1] / "environment.json")
        assert (environment["processes"], environment["device"]) == (2, "cpu")
    assert same_weights(*runs)


@pytest.mark.parametrize(
    "launcher",
    ["python", "accelerate launch --config_file ../accelerate_configs/cpu.yaml"]
    + [pytest.param("accelerate launch", marks=pytest.mark.slow)],
)
def test_train_py_starts_from_its_own_folder_with_and_without_a_config(launcher, start, tmp_path):
    """Here, `accel_demo/` is first on sys.path, so its modules must not shadow known packages."""
    flags = ["--dataset", "synthetic", "--max-steps", 2, "--run-dir", tmp_path / "run"]
    result = start([*launcher.split(), "train.py", *flags], cwd=REPOSITORY / "accel_demo")
    assert result.returncode == 0, result.stderr
    assert "1 process on cpu" in result.stdout


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 1, reason="needs 1 GPU(s)")
@pytest.mark.parametrize(("launcher", "processes"), [("python", 1), ("accelerate launch", GPUS)])
def test_without_a_config_train_py_uses_one_gpu_and_accelerate_launch_all(
    launcher, processes, start, tmp_path
):
    flags = ["--dataset", "synthetic", "--max-steps", 2, "--run-dir", tmp_path / "run"]
    command = [*launcher.split(), "train.py", *flags]
    result = start(command, cwd=REPOSITORY / "accel_demo", **VISIBLE_GPUS)
    assert result.returncode == 0, result.stderr
    environment = read(tmp_path / "run" / "environment.json")
    assert (environment["processes"], environment["device"]) == (processes, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 1, reason="needs 1 GPU(s)")
@pytest.mark.parametrize("file", ["train.py", "train_ddp.py"])
def test_more_processes_than_gpus_train_on_the_cpu(file, start, tmp_path):
    flags = ["--dataset", "synthetic", "--max-steps", 2, "--run-dir", tmp_path / "run"]
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", GPUS + 1]
    result = start([*torchrun, f"accel_demo/{file}", *flags], **VISIBLE_GPUS)
    assert result.returncode == 0, result.stderr
    environment = read(tmp_path / "run" / "environment.json")
    assert (environment["processes"], environment["device"]) == (GPUS + 1, "cpu")


@pytest.mark.parametrize(("gpus", "processes", "hidden"), [(1, 2, True), (2, 2, False)])
def test_gpus_are_hidden_if_there_are_too_few(gpus, processes, hidden, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert devices.use_cpu() is hidden
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("-1" if hidden else "0,1")
