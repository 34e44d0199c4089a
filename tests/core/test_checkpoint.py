"""What `--resume` goes on from, what it refuses, and what it never deletes."""

import json
import os
import shutil
from pathlib import Path

import pytest

from accel_demo import train_plain
from accel_demo.config import TrainConfig
from accel_demo.errors import UserError
from accel_demo.run import checkpoint, manifest
from accel_demo.run.manifest import checkpoints_of
from tests.conftest import GPUS, VISIBLE_GPUS, launcher

CHOICES = {"dataset": "synthetic", "model": "tiny_cnn", "train_samples": 64, "test_samples": 20}
CHOICES |= {"batch_size": 8, "epochs": 3, "log_every": 1, "checkpoint_every": 3, "keep_last": 99}


def train(run: Path, **choices) -> None:
    train_plain.main(TrainConfig(**{**CHOICES, "run_dir": str(run), **choices}))


def names(run: Path) -> list[str]:
    return [path.name for path in reversed(checkpoints_of(run))]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run that has ended: 24 steps, a checkpoint after every third and at each epoch's end."""
    run = tmp_path_factory.mktemp("ended") / "run"
    train(run)
    return run


@pytest.fixture
def run(ended, tmp_path):
    """A copy of it."""
    return shutil.copytree(ended, tmp_path / "run")


def interrupted(run: Path, newest: str) -> Path:
    """The run as it was when this checkpoint was the newest."""
    for path in checkpoints_of(run):
        if path.name > newest:
            shutil.rmtree(path)
    (run / "summary.json").unlink()
    (run / "model.safetensors").unlink()
    return run


def test_there_is_a_checkpoint_every_n_steps_and_at_each_end_of_an_epoch(run):
    assert names(run) == [
        *("epoch-0000-batch-000003", "epoch-0000-batch-000006", "epoch-0001-batch-000000"),
        *("epoch-0001-batch-000001", "epoch-0001-batch-000004", "epoch-0001-batch-000007"),
        *("epoch-0002-batch-000000", "epoch-0002-batch-000002", "epoch-0002-batch-000005"),
        "epoch-0003-batch-000000",
    ]


def test_only_the_last_few_are_kept(tmp_path):
    train(tmp_path / "run", keep_last=2)
    assert names(tmp_path / "run") == ["epoch-0002-batch-000005", "epoch-0003-batch-000000"]


def test_it_goes_on_with_the_same_lines_of_metrics_and_the_same_best_accuracy(run, ended):
    interrupted(run, "epoch-0001-batch-000004")
    train(run, resume="auto")
    for name in ("metrics.jsonl", "summary.json"):
        found, wanted = (facts(folder / name) for folder in (run, ended))
        assert found == wanted
    assert found[0]["best_test_accuracy"] > 0


def facts(path: Path) -> list[dict]:
    """The JSON objects in a file, without what is about time."""
    text = path.read_text()
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    about_time = ("images_per_second", "train_seconds")
    return [{k: v for k, v in json.loads(line).items() if k not in about_time} for line in lines]


def test_an_ended_run_that_is_resumed_has_nothing_left_to_do(run, ended, capsys):
    train(run, resume="auto")
    assert (run / "model.safetensors").read_bytes() == (ended / "model.safetensors").read_bytes()
    assert "after step 24" in capsys.readouterr().out


def test_without_resume_a_run_that_has_not_ended_is_not_started_over(run):
    interrupted(run, "epoch-0002-batch-000000")
    before = names(run)
    with pytest.raises(UserError, match="contains an unfinished run. Continue it with"):
        train(run)
    assert names(run) == before


def test_an_ended_run_is_started_over(run):
    train(run, keep_last=1)
    assert names(run) == ["epoch-0003-batch-000000"]
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == list(range(1, 25)) and len(steps) == 24 + 3


def test_where_nothing_is_whole_nothing_is_deleted_and_nothing_is_trained(run):
    for path in checkpoints_of(run):
        with open(path / "optimizer.bin", "ab") as file:
            file.write(b"!")
    before = names(run)
    with pytest.raises(UserError, match="optimizer.bin has .* and there is no complete one"):
        train(run, resume="auto")
    assert names(run) == before


def test_a_folder_of_the_users_own_is_left_alone(run, tmp_path):
    interrupted(run, "epoch-0002-batch-000000")
    (run / "checkpoints" / "notes").mkdir()
    (run / "checkpoints" / "notes" / "mine.txt").write_text("mine")
    (run / "checkpoints" / "link").symlink_to(tmp_path)
    train(run, resume="auto")
    train(run)
    assert (run / "checkpoints" / "notes" / "mine.txt").read_text() == "mine"
    assert (run / "checkpoints" / "link").is_symlink()


def test_going_on_from_an_older_one_does_not_drop_the_newer_ones(run):
    before = names(run)
    older = run / "checkpoints" / "epoch-0001-batch-000004"
    with pytest.raises(UserError, match="contains newer checkpoints than epoch-0001-batch-000004"):
        train(run, resume=str(older))
    assert names(run) == before and (run / "summary.json").exists()


def test_it_goes_on_in_another_folder_that_is_empty_and_in_no_other(run, ended, tmp_path):
    older = str(ended / "checkpoints" / "epoch-0001-batch-000004")
    with pytest.raises(UserError, match="already contains a different run"):
        train(run, resume=older)
    train(tmp_path / "new", resume=older)
    whole = [(folder / "model.safetensors").read_bytes() for folder in (tmp_path / "new", ended)]
    assert whole[0] == whole[1]


def test_a_checkpoint_goes_on_in_the_folder_of_its_run_from_wherever_it_is_named(run, monkeypatch):
    interrupted(run, "epoch-0001-batch-000004")
    monkeypatch.chdir(run / "checkpoints")
    train(run, resume="epoch-0001-batch-000004", run_dir="")
    assert (run / "summary.json").exists()
    assert not (run / "checkpoints" / "runs").exists()


@pytest.mark.parametrize("what", ["nowhere", "file", "", "checkpoints"])
def test_what_is_no_checkpoint_is_refused_before_anything_is_written(what, run, tmp_path):
    (run / "file").write_text("")
    named = tmp_path / "nowhere" / "checkpoints" / "x" if what == "nowhere" else run / what
    with pytest.raises(UserError, match="is not a checkpoint. Name a folder in a run"):
        train(tmp_path / "new", resume=str(named))
    assert not (tmp_path / "new").exists() and not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(("name", "value"), [("seed", 1), ("epochs", 4), ("batch_size", 4)])
def test_a_checkpoint_of_another_run_is_refused(name, value, ended, tmp_path):
    with pytest.raises(UserError, match=f"belongs to a run with {name} "):
        train(
            tmp_path / "new",
            resume=str(ended / "checkpoints" / "epoch-0003-batch-000000"),
            **{name: value},
        )


def test_auto_says_when_there_is_nothing_to_go_on_from(tmp_path, capsys):
    train(tmp_path / "run", resume="auto")
    assert "there is no checkpoint in" in capsys.readouterr().out


def test_two_runs_do_not_train_in_one_folder(start, tmp_path):
    """The lock is the process's own, so the other one has to be another process."""
    import fcntl

    run = tmp_path / "run"
    run.mkdir()
    with open(run / ".lock", "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        flags = ["--dataset", "synthetic", "--max-steps", 2, "--run-dir", run]
        result = start(["python", "accel_demo/train_plain.py", *flags])
    assert result.returncode == 2 and "another process is training in" in result.stderr
    assert not (run / "metrics.jsonl").exists()


def test_everything_is_on_the_disk_before_it_has_its_name(run, monkeypatch):
    """Files, then the folder with their names, then the new name, then the folder with that."""
    done, fsync, rename = [], os.fsync, os.rename

    def noted_fsync(descriptor):
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def noted_rename(old, new):
        done.append(f"{Path(old).name} -> {Path(new).name}")
        rename(old, new)

    interrupted(run, "epoch-0002-batch-000005")
    monkeypatch.setattr(manifest.os, "fsync", noted_fsync)
    monkeypatch.setattr(manifest.os, "rename", noted_rename)
    train(run, resume="auto")
    place = done.index(f"{checkpoint.UNFINISHED} -> epoch-0003-batch-000000")
    files = {path.name for path in checkpoints_of(run)[0].iterdir()}
    before = done[:place]
    assert done[place - 1] == checkpoint.UNFINISHED and done[place + 1] == "checkpoints"
    assert len(files) >= 6 and files <= set(before[before.index("metrics.jsonl") :])


def test_a_viewer_forgets_the_steps_that_are_trained_again(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tmp_path / "run", track="tensorboard")
    interrupted(tmp_path / "run", "epoch-0001-batch-000004")
    train(tmp_path / "run", track="tensorboard", resume="auto")
    seen = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.step for event in seen.Scalars("train_loss")] == list(range(1, 25))


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 1, reason="needs 1 GPU(s)")
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("telling", ["train.py", "train_ddp.py", "train_plain.py"])
def test_a_run_on_a_gpu_goes_on(telling, precision, start, tmp_path):
    """Where it stood, and to the end. (Not to the bit: some GPU operations add in any order.)"""
    command = [*launcher(telling, 1), f"accel_demo/{telling}"]
    if telling == "train.py":
        config = ["--config_file", "accelerate_configs/single_gpu.yaml"]
        command = ["accelerate", "launch", *config, "--mixed_precision", precision, command[-1]]
    else:
        command += ["--mixed-precision", precision]
    flags = ["--train-samples", 4096, "--epochs", 2, "--checkpoint-every", 5, "--keep-last", 99]
    visible = {"CUDA_VISIBLE_DEVICES": (VISIBLE_GPUS["CUDA_VISIBLE_DEVICES"] or "0").split(",")[0]}
    result = start([*command, *flags, "--run-dir", tmp_path / "run"], **visible)
    assert result.returncode == 0, result.stderr
    inside = tmp_path / "run" / "checkpoints" / "epoch-0001-batch-000003"
    found = [*command, *flags, "--run-dir", tmp_path / "new", "--resume", inside]
    result = start(found, **visible)
    assert result.returncode == 0 and "after step 35" in result.stdout, result.stderr
    summaries = [
        json.loads((tmp_path / run / "summary.json").read_text()) for run in ("run", "new")
    ]
    assert summaries[1]["device"] == "cuda"
    assert abs(summaries[0]["test_accuracy"] - summaries[1]["test_accuracy"]) < 0.03
