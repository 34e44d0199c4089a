"""Test that a run folder that only some of the processes see is refused before training."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from accel_demo.config import TrainConfig
from accel_demo.errors import UserError
from accel_demo.processes import peers
from accel_demo.processes.peers import Peer, own_host
from accel_demo.processes.signals import StopSignals
from accel_demo.run.folder import describe_run
from accel_demo.run.run import claim_run
from accel_demo.run.shared_folder import raised_everywhere, shared_folder
from tests.conftest import REPOSITORY, rank_environments, start_process, text_of

FLAGS = "--dataset synthetic --train-samples 64 --test-samples 20 --batch-size 4 --epochs 1"


def train_in(folders: list[Path], program: str, tmp_path: Path, *flags) -> tuple[list, list[str]]:
    """Train in one process per folder, each with a different working directory.

    The processes have the environment of two machines with one process each: both have local rank
    0. Return their exit codes and what they have printed.
    """
    command = ["python", REPOSITORY / "accel_demo" / program, *FLAGS.split(), *flags]
    processes, outputs = [], []
    with rank_environments(len(folders)) as environments:
        for folder, environment in zip(folders, environments, strict=True):
            folder.mkdir(exist_ok=True)
            outputs.append(open(tmp_path / f"output-{len(outputs)}.txt", "w+"))
            variables: dict = {**environment, "LOCAL_RANK": "0"}
            processes.append(
                start_process(command, outputs[-1], outputs[-1], cwd=folder, **variables)
            )
        codes = [process.wait(60) for process in processes]
    printed = [text_of(output) for output in outputs]
    for output in outputs:
        output.close()
    return codes, printed


@pytest.mark.parametrize(("program", "existed"), [("train.py", False), ("train_ddp.py", True)])
def test_a_run_folder_that_only_one_machine_sees_is_refused_before_training(
    program, existed, tmp_path
):
    """Each machine removes its run folder, unless the folder existed before."""
    folders = [tmp_path / "first", tmp_path / "second"]
    if existed:
        for folder in folders:
            (folder / "run").mkdir(parents=True)
    codes, printed = train_in(folders, program, tmp_path, "--run-dir", "run")
    assert codes == [2, 2], printed
    for text in printed:  # one line on each machine; rank 1 knows the folder of rank 0
        (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
        assert f"error: rank 1 does not see the run folder {folders[0] / 'run'} of rank 0." in line
        assert "Choose a --run-dir on storage that all machines share." in line
        assert "Traceback" not in text and "images per step" not in text
    for folder in folders:
        assert [*folder.rglob("*")] == ([folder / "run"] if existed else [])


def refusal_of_a_checkpoint(device, run_dir: str) -> str:
    """Begin a run whose checkpoint only rank 1 cannot load. Return the error."""
    config = TrainConfig(dataset="synthetic", model="tiny_cnn", run_dir=run_dir)
    environment = describe_run("script", "method", device, "no")
    run = claim_run(config, environment, StopSignals(1), device, batches_per_epoch=1)

    def load(*arguments):
        if dist.get_rank() == 1:
            raise UserError("the checkpoint cannot be loaded")

    run.checkpoints.load = load  # pyright: ignore[reportAttributeAccessIssue]
    try:
        run.load_checkpoint(load, torch.nn.Linear(1, 1), None)
        run.begin()
    except UserError as error:
        return str(error)
    return ""


def test_if_one_process_cannot_load_the_checkpoint_no_process_begins(together, tmp_path):
    errors = together(refusal_of_a_checkpoint, 2, run_dir=str(tmp_path / "run"))
    assert errors == ["the checkpoint cannot be loaded"] * 2
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def test_a_lock_that_cannot_be_opened_is_reported_in_one_line(tmp_path):
    (tmp_path / "first" / ".lock").mkdir(parents=True)
    codes, printed = train_in([tmp_path / "first"] * 2, "train.py", tmp_path, "--run-dir", ".")
    assert codes == [2, 2], printed
    for text in printed:
        assert "error: " in text and "cannot write . (Is a directory)" in text, text
        assert "Traceback" not in text


def test_two_machines_that_share_the_run_folder_train(tmp_path):
    folders = [tmp_path / "first", tmp_path / "second"]
    run = tmp_path / "run"
    codes, printed = train_in(folders, "train_ddp.py", tmp_path, "--run-dir", run)
    assert codes == [0, 0], printed
    assert "2 processes on cpu" in printed[0]
    assert not [path for path in run.iterdir() if path.name.startswith(".seen")]


def problem_of_one_rank(world_size: int) -> tuple[str, float]:
    """Only the last rank fails. Return the error and how long it took to arrive."""
    started = time.monotonic()
    try:
        with raised_everywhere():
            if os.environ["RANK"] == str(world_size - 1):
                raise UserError("the disk is full")
    except UserError as error:
        return str(error), time.monotonic() - started
    return "", 0.0


def test_an_error_of_one_process_is_raised_in_all(together):
    for error, seconds in together(problem_of_one_rank, 3, world_size=3):
        assert error == "the disk is full" and seconds < 10


def problem_of_one_machine() -> str:
    """As above, on two machines with one process each."""
    peers._peers[:] = [Peer(machine, own_host(), 1, True) for machine in ("first", "second")]
    return problem_of_one_rank(2)[0]


def test_an_error_of_one_machine_names_the_machine(together):
    assert together(problem_of_one_machine, 2) == [f"{own_host()}: the disk is full"] * 2


def seconds_of_check(folder: str) -> float:
    """Return the time of a check of a folder that all processes see, without the first one."""
    for _ in range(2):
        started = time.monotonic()
        shared_folder(lambda: (Path(folder), False))
    return time.monotonic() - started


def test_the_check_takes_no_time_worth_mentioning(together, tmp_path):
    assert max(together(seconds_of_check, 2, folder=str(tmp_path))) < 0.5
    assert list(tmp_path.iterdir()) == []
