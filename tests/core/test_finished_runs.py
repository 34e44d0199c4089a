"""Test that the results of a finished run survive the next run in the same folder."""

import os
import shutil
from pathlib import Path

import pytest

from accel_demo import train_plain
from accel_demo.config import TrainConfig
from accel_demo.errors import UserError
from accel_demo.files import rename
from accel_demo.run import resume
from accel_demo.run.shared_folder import lock_folder
from tests.conftest import launcher
from tests.core.test_shared_folder import train_in
from tests.runs import Killed, interrupt_after, read, same_weights

CHOICES = {"dataset": "synthetic", "model": "tiny_cnn", "train_samples": 32, "test_samples": 20}
CHOICES |= {"batch_size": 8, "epochs": 1, "track": "tensorboard"}
FLAGS = "--dataset synthetic --model tiny_cnn --max-steps 2 --test-samples 20".split()


def train(run: Path | str, **choices) -> None:
    train_plain.main(TrainConfig(**{**CHOICES, "run_dir": str(run), **choices}))


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of each file below `folder`, by relative path."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run = tmp_path_factory.mktemp("finished") / "run"
    train(run)
    return run


@pytest.fixture
def run(finished, tmp_path):
    """A copy of the finished run."""
    return shutil.copytree(finished, tmp_path / "run")


def test_running_the_same_command_again_keeps_the_finished_run_under_the_next_number(
    run, finished, capsys
):
    for number in (1, 2, 3):
        before = contents(run)
        train(run)
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"the finished run in {run} is now {run}.{number}"
        assert contents(Path(f"{run}.{number}")) == before
        assert same_weights(run, finished)
        assert len(list((run / "tensorboard").iterdir())) == 1
    assert sorted(path.name for path in run.parent.iterdir()) == ["run", "run.1", "run.2", "run.3"]


def test_the_highest_number_is_the_latest_run_even_if_numbers_are_missing(run):
    for name in ("run.7", "run.x", "run.9.txt", "run-2.12"):
        (run.parent / name).mkdir()
    (run.parent / "run.10").touch()  # a file takes its number, too
    train(run)
    assert (run.parent / "run.11" / "summary.json").exists()


def test_a_resumed_run_keeps_its_folder(run):
    train(run, resume="auto")
    assert [path.name for path in run.parent.iterdir()] == ["run"]
    interrupt_after(run, "epoch-0001-batch-000000")
    train(run, resume="auto")
    assert [path.name for path in run.parent.iterdir()] == ["run"]


def test_if_there_is_no_checkpoint_to_resume_from_the_finished_run_is_kept(run, finished):
    shutil.rmtree(run / "checkpoints")
    train(run, resume="auto")
    assert same_weights(run.parent / "run.1", finished)
    assert (run / "summary.json").exists()


def test_an_unfinished_run_is_not_renamed(run):
    interrupt_after(run, "epoch-0001-batch-000000")
    with pytest.raises(UserError, match="contains an unfinished run. Continue it with"):
        train(run)
    shutil.rmtree(run / "checkpoints")  # as if it had been killed before the first checkpoint
    train(run)
    assert [path.name for path in run.parent.iterdir()] == ["run"]


def test_a_run_with_other_options_does_not_rename_the_finished_run(run):
    with pytest.raises(UserError, match="contains a run with seed 0, not 1"):
        train(run, seed=1)
    assert [path.name for path in run.parent.iterdir()] == ["run"]


def test_a_symbolic_link_to_the_run_folder_leads_to_the_new_run(run, tmp_path, capsys):
    link = tmp_path / "elsewhere" / "link"
    link.parent.mkdir()
    link.symlink_to(run)
    before = contents(run)
    train(link)
    assert f"the finished run in {link} is now {run}.1\n" in capsys.readouterr().out
    assert contents(run.parent / "run.1") == before
    assert link.is_symlink() and link.resolve() == run
    assert [path.name for path in link.parent.iterdir()] == ["link"]


@pytest.mark.parametrize("given", ["run/", "./run//", "nested/../run"])
def test_the_run_folder_may_be_written_in_any_way(given, run, monkeypatch, capsys):
    (run.parent / "nested").mkdir()
    monkeypatch.chdir(run.parent)
    train(given)
    printed = capsys.readouterr().out.splitlines()[0]
    new_name = printed.removeprefix(f"the finished run in {Path(given)} is now ")
    assert os.path.samefile(new_name, run.parent / "run.1")


@pytest.mark.parametrize(("inside", "given"), [("", "."), ("checkpoints", ".."), ("", "../run")])
def test_the_working_directory_of_the_user_is_not_renamed(inside, given, run, monkeypatch):
    monkeypatch.chdir(run / inside)
    before = contents(run)
    with pytest.raises(UserError, match="it contains the working directory. Change to a different"):
        train(given)
    assert contents(run) == before and [path.name for path in run.parent.iterdir()] == ["run"]


def test_a_run_folder_that_cannot_be_renamed_is_one_line_and_exit_code_2(start, tmp_path):
    run = tmp_path / ("r" * 255)  # the longest name of a folder: there is no room for a number
    command = ["python", "accel_demo/train_plain.py", *FLAGS, "--run-dir", run]
    assert start(command).returncode == 0
    before = contents(run)
    result = start(command)
    (line,) = [line for line in result.stderr.splitlines() if "error: " in line]
    reason = "contains a finished run and cannot be renamed (File name too long). Choose a"
    assert result.returncode == 2 and reason in line and "Traceback" not in result.stderr
    assert contents(run) == before and list(tmp_path.iterdir()) == [run]


@pytest.mark.parametrize("is_linked", [False, True])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_before_or_after_the_renaming_loses_nothing(
    moment, is_linked, run, tmp_path, monkeypatch
):
    """After the renaming, the run folder does not exist, and a link to it leads nowhere."""
    folder = run
    if is_linked:
        folder = tmp_path / "link"
        folder.symlink_to(run)
    before = contents(run)

    def killed(old: Path, new: Path) -> None:
        if moment == "after":
            rename(old, new)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(resume, "rename", killed)
        with pytest.raises(Killed):
            train(folder)
    kept = run if moment == "before" else run.parent / "run.1"
    assert contents(kept) == before and run.exists() == (moment == "before")
    train(folder)
    assert contents(run.parent / "run.1") == before and same_weights(run, run.parent / "run.1")
    assert not (run.parent / "run.2").exists()


def test_a_launch_that_opened_the_lock_before_the_renaming_is_refused(run, monkeypatch):
    """Otherwise it would hold the lock of the old folder, and both would train in the new one."""
    opened = os.open

    def open_before_the_renaming(path, *arguments):
        descriptor = opened(path, *arguments)
        monkeypatch.setattr(os, "open", opened)
        resume.keep_finished(run)
        return descriptor

    monkeypatch.setattr(os, "open", open_before_the_renaming)
    for _ in range(2):  # in the second case, another launch has created the new lock already
        with pytest.raises(UserError, match="another process is training in"):
            lock_folder(run)
        (run / ".lock").touch()
        (run / "summary.json").touch()
        monkeypatch.setattr(os, "open", open_before_the_renaming)


@pytest.mark.parametrize("file", ["train.py", "train_ddp.py"])
def test_with_several_processes_only_one_renames_and_prints(file, start, tmp_path):
    command = [*launcher(file, 2), f"accel_demo/{file}", *FLAGS, "--run-dir", tmp_path / "run"]
    outputs = [start(command) for _ in range(3)]
    for output in outputs:
        assert output.returncode == 0, output.stderr
        assert "2 processes on cpu" in output.stdout
    line = f"the finished run in {tmp_path / 'run'} is now {tmp_path / 'run'}"
    counts = [output.stdout.count("the finished run in") for output in outputs]
    assert counts == [0, 1, 1] and f"{line}.2\n" in outputs[2].stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.1", "run.2"]
    for run in tmp_path.iterdir():
        assert read(run / "environment.json")["processes"] == 2
        assert not list(run.glob(".seen*"))
        (checkpoint,) = (run / "checkpoints").iterdir()
        states = {path.name for path in checkpoint.glob("random_states_*")}
        assert states == {"random_states_0.pkl", "random_states_1.pkl"}


def test_two_machines_that_share_the_folder_keep_the_finished_run(tmp_path):
    """Each of the two processes has a working directory of its own."""
    folders, run = [tmp_path / "first", tmp_path / "second"], tmp_path / "run"
    for _ in range(2):
        codes, printed = train_in(folders, "train_ddp.py", tmp_path, "--run-dir", run)
        assert codes == [0, 0], printed
    assert f"the finished run in {run} is now {run}.1" in printed[0]
    assert "is now" not in printed[1]
    assert same_weights(run, tmp_path / "run.1")


def test_the_folder_is_not_renamed_if_one_process_works_in_it(tmp_path):
    folders, run = [tmp_path / "first", tmp_path / "run"], tmp_path / "run"
    train_in([tmp_path / "first"] * 2, "train_ddp.py", tmp_path, "--run-dir", run)
    codes, printed = train_in(folders, "train_ddp.py", tmp_path, "--run-dir", run)
    assert codes == [2, 2], printed
    assert all("it contains the working directory" in text for text in printed)
    assert not (tmp_path / "run.1").exists() and (run / "summary.json").exists()
