"""Test which checkpoints `--resume` loads or refuses, and which checkpoints a run keeps."""

import os
import shutil
from pathlib import Path

import pytest

from accel_demo import train_plain
from accel_demo.config import TrainConfig
from accel_demo.errors import UserError
from accel_demo.run import checkpoint
from accel_demo.run.checkpoint import UNFINISHED
from accel_demo.run.manifest import checkpoints_of
from accel_demo.run.state import TrainingState
from tests.conftest import GPUS, VISIBLE_GPUS, launcher
from tests.runs import (
    interrupt_after,
    names_of_checkpoints,
    read,
    results_of,
    same_weights,
)

CHOICES = {"dataset": "synthetic", "model": "tiny_cnn", "train_samples": 64, "test_samples": 20}
CHOICES |= {"batch_size": 8, "epochs": 3, "log_every": 1, "checkpoint_every": 3, "keep_last": 99}


def train(run: Path, **choices) -> None:
    train_plain.main(TrainConfig(**{**CHOICES, "run_dir": str(run), **choices}))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of 24 steps, with a checkpoint after every third step and after each epoch."""
    run = tmp_path_factory.mktemp("finished") / "run"
    train(run)
    return run


@pytest.fixture
def run(finished, tmp_path):
    """A copy of the finished run."""
    return shutil.copytree(finished, tmp_path / "run")


def test_a_checkpoint_is_saved_every_n_steps_and_after_each_epoch(run):
    assert names_of_checkpoints(run) == [
        *("epoch-0000-batch-000003", "epoch-0000-batch-000006", "epoch-0001-batch-000000"),
        *("epoch-0001-batch-000001", "epoch-0001-batch-000004", "epoch-0001-batch-000007"),
        *("epoch-0002-batch-000000", "epoch-0002-batch-000002", "epoch-0002-batch-000005"),
        "epoch-0003-batch-000000",
    ]


def test_only_the_last_few_checkpoints_are_kept(tmp_path):
    train(tmp_path / "run", keep_last=2)
    assert names_of_checkpoints(tmp_path / "run") == [
        "epoch-0002-batch-000005",
        "epoch-0003-batch-000000",
    ]


def test_a_resumed_run_writes_the_same_metrics_and_best_accuracy(run, finished):
    interrupt_after(run, "epoch-0001-batch-000004")
    train(run, resume="auto")
    assert results_of(run, "") == results_of(finished, "")
    assert results_of(run)[-1]["best_test_accuracy"] > 0


def test_resuming_a_finished_run_does_not_change_the_model(run, finished, capsys):
    train(run, resume="auto")
    assert same_weights(run, finished)
    assert "after step 24" in capsys.readouterr().out


def test_without_resume_an_unfinished_run_is_not_started_again(run):
    interrupt_after(run, "epoch-0002-batch-000000")
    before = names_of_checkpoints(run)
    with pytest.raises(UserError, match="contains an unfinished run. Continue it with"):
        train(run)
    assert names_of_checkpoints(run) == before


def test_if_no_checkpoint_is_complete_nothing_is_deleted_or_trained(run):
    for path in checkpoints_of(run):
        with open(path / "optimizer.bin", "ab") as file:
            file.write(b"!")
    before = names_of_checkpoints(run)
    with pytest.raises(UserError, match="optimizer.bin has .* and there is no complete checkpoint"):
        train(run, resume="auto")
    assert names_of_checkpoints(run) == before


def test_folders_and_links_that_a_user_created_are_not_deleted(run, tmp_path):
    interrupt_after(run, "epoch-0002-batch-000000")
    (run / "checkpoints" / "notes").mkdir()
    (run / "checkpoints" / "notes" / "mine.txt").write_text("mine")
    (run / "checkpoints" / "link").symlink_to(tmp_path)
    train(run, resume="auto")
    assert (run / "checkpoints" / "notes" / "mine.txt").read_text() == "mine"
    assert (run / "checkpoints" / "link").is_symlink()


def test_resuming_from_an_older_checkpoint_does_not_delete_newer_ones(run):
    before = names_of_checkpoints(run)
    older = run / "checkpoints" / "epoch-0001-batch-000004"
    with pytest.raises(UserError, match="contains newer checkpoints than epoch-0001-batch-000004"):
        train(run, resume=str(older))
    assert names_of_checkpoints(run) == before and (run / "summary.json").exists()


def test_a_checkpoint_can_be_resumed_in_a_new_folder_but_not_in_a_used_one(run, finished, tmp_path):
    older = str(finished / "checkpoints" / "epoch-0001-batch-000004")
    with pytest.raises(UserError, match="already contains a different run"):
        train(run, resume=older)
    train(tmp_path / "new", resume=older)
    assert same_weights(tmp_path / "new", finished)


def test_without_run_dir_a_checkpoint_is_resumed_in_the_folder_of_its_run(run, monkeypatch):
    interrupt_after(run, "epoch-0001-batch-000004")
    monkeypatch.chdir(run / "checkpoints")
    train(run, resume="epoch-0001-batch-000004", run_dir="")
    assert (run / "summary.json").exists()
    assert not (run / "checkpoints" / "runs").exists()


@pytest.mark.parametrize("name", ["nowhere", "file", "", "checkpoints"])
def test_a_path_that_is_not_a_checkpoint_is_refused_before_anything_is_written(name, run, tmp_path):
    (run / "file").write_text("")
    path = tmp_path / "nowhere" / "checkpoints" / "x" if name == "nowhere" else run / name
    with pytest.raises(UserError, match="is not a checkpoint. Choose a folder in a run"):
        train(tmp_path / "new", resume=str(path))
    assert not (tmp_path / "new").exists() and not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(("name", "value"), [("seed", 1), ("epochs", 4), ("batch_size", 4)])
def test_a_checkpoint_of_a_different_run_is_refused(name, value, finished, tmp_path):
    resume = str(finished / "checkpoints" / "epoch-0003-batch-000000")
    with pytest.raises(UserError, match=f"belongs to a run with {name} "):
        train(tmp_path / "new", resume=resume, **{name: value})


def test_resume_auto_prints_a_line_if_there_is_no_checkpoint(tmp_path, capsys):
    train(tmp_path / "run", resume="auto")
    assert "there is no checkpoint in" in capsys.readouterr().out


def test_a_folder_in_which_another_process_trains_is_refused_and_not_changed(start, tmp_path):
    """A process never conflicts with its own lock, so the training runs in a second process."""
    import fcntl

    run = tmp_path / "run"
    being_written = run / "checkpoints" / UNFINISHED / "model.safetensors"
    being_written.parent.mkdir(parents=True)
    being_written.touch()
    with open(run / ".lock", "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        flags = ["--dataset", "synthetic", "--max-steps", 2, "--run-dir", run]
        result = start(["python", "accel_demo/train_plain.py", *flags])
    assert result.returncode == 2 and "another process is training in" in result.stderr
    assert {path.name for path in run.iterdir()} == {".lock", "checkpoints"}
    assert being_written.exists()


def test_a_checkpoint_that_cannot_be_loaded_leaves_the_results_as_they_were(run, monkeypatch):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert len(before) > 10
    monkeypatch.setattr(TrainingState, "load", lambda state, folder: {}["missing"])
    with pytest.raises(UserError, match="cannot be loaded"):
        train(run, resume="auto")
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_all_files_are_on_the_disk_before_a_checkpoint_gets_its_name(run, monkeypatch):
    """The order is: sync the files, sync their folder, rename it, and sync the parent folder."""
    done, fsync, rename = [], os.fsync, os.rename

    def recorded_fsync(descriptor):
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def recorded_rename(old, new):
        done.append(f"{Path(old).name} -> {Path(new).name}")
        rename(old, new)

    interrupt_after(run, "epoch-0002-batch-000005")
    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    train(run, resume="auto")
    renamed_at = done.index(f"{checkpoint.UNFINISHED} -> epoch-0003-batch-000000")
    files = {path.name for path in checkpoints_of(run)[0].iterdir()}
    before = done[:renamed_at]
    assert done[renamed_at - 1] == checkpoint.UNFINISHED and done[renamed_at + 1] == "checkpoints"
    assert len(files) >= 6 and files <= set(before[before.index("metrics.jsonl") :])


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 1, reason="needs 1 GPU(s)")
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("file", ["train.py", "train_ddp.py", "train_plain.py"])
def test_a_run_on_a_gpu_can_be_resumed(file, precision, start, tmp_path):
    """The accuracy may differ slightly, because some GPU kernels are not deterministic."""
    command = [*launcher(file, 1), f"accel_demo/{file}"]
    if file == "train.py":
        config = ["--config_file", "accelerate_configs/single_gpu.yaml"]
        command = ["accelerate", "launch", *config, "--mixed_precision", precision, command[-1]]
    else:
        command += ["--mixed-precision", precision]
    flags = ["--train-samples", 4096, "--epochs", 2, "--checkpoint-every", 5, "--keep-last", 99]
    visible = {"CUDA_VISIBLE_DEVICES": (VISIBLE_GPUS["CUDA_VISIBLE_DEVICES"] or "0").split(",")[0]}
    result = start([*command, *flags, "--run-dir", tmp_path / "run"], **visible)
    assert result.returncode == 0, result.stderr
    inside = tmp_path / "run" / "checkpoints" / "epoch-0001-batch-000003"
    resumed = [*command, *flags, "--run-dir", tmp_path / "new", "--resume", inside]
    result = start(resumed, **visible)
    assert result.returncode == 0 and "after step 35" in result.stdout, result.stderr
    summaries = [read(tmp_path / run / "summary.json") for run in ("run", "new")]
    assert summaries[1]["device"] == "cuda"
    assert abs(summaries[0]["test_accuracy"] - summaries[1]["test_accuracy"]) < 0.03
