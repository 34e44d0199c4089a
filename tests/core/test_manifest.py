"""Test that changes to a checkpoint are detected, and that loading a checkpoint runs no code."""

import json
import os
import pathlib
import re
import shutil

import pytest
import torch
from accelerate import Accelerator
from accelerate.checkpointing import load_accelerator_state, load_custom_state
from accelerate.utils import constants
from accelerate.utils.fsdp_utils import load_fsdp_model, load_fsdp_optimizer

from accel_demo.errors import UserError, one_line_errors
from accel_demo.run.manifest import (
    LOADED,
    MANIFEST,
    SEAL,
    Damaged,
    checkpoints_of,
    newest_complete,
    seal,
    verify,
)
from tests.core.test_bad_input import one_line
from tests.runs import train_here

CHOICES = {"dataset": "synthetic", "model": "tiny_cnn", "max_steps": 2, "test_samples": 50}
CHOICES |= {"checkpoint_every": 1, "dropout": 0.2}  # dropout: each step changes the random state
PICKLES = ("optimizer.bin", "scheduler.bin", "random_states_0.pkl")
POSITION_BYTES = 100  # these first bytes of the manifest contain the position in the run


@pytest.fixture(scope="module", params=["train_plain.py", "train.py"])
def trained(request, tmp_path_factory):
    """Return the train file, and its run of two steps with a checkpoint after each step."""
    run = tmp_path_factory.mktemp(request.param) / "run"
    return request.param, train_here(request.param, run, **CHOICES)


@pytest.fixture
def run(trained, tmp_path):
    """A copy of a run with two checkpoints."""
    return shutil.copytree(trained[1], tmp_path / "run")


@pytest.fixture
def resume(trained, run, capsys):
    """`resume(checkpoint)` resumes `run`. It returns the error message, or "" on success."""

    def resume(folder: pathlib.Path) -> str:
        capsys.readouterr()
        try:
            with one_line_errors():
                train_here(trained[0], run, **CHOICES, resume=str(folder))
        except SystemExit as stopped:
            assert stopped.code == 2
            return one_line(capsys.readouterr().err)
        return ""

    return resume


def flipped(content: bytes, index: int) -> bytes:
    return content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :]


def damages(name: str, content: bytes):
    """Yield damaged versions of a file's content. None means that the file is deleted."""
    yield from (content[:-1], b"", content + b"\0", None)
    every = {SEAL: len(content), MANIFEST: POSITION_BYTES}.get(name, 0)
    for index in sorted({*range(every), 0, len(content) // 2, len(content) - 1}):
        yield flipped(content, index)


def test_any_damage_is_detected_and_the_previous_checkpoint_is_used(run):
    newest, previous = checkpoints_of(run)
    tried = 0
    for path in sorted(newest.iterdir()):
        content = path.read_bytes()
        for damaged in damages(path.name, content):
            path.unlink(missing_ok=True)
            if damaged is not None:
                path.write_bytes(damaged)
            named = f"{MANIFEST}|{SEAL}" if path.name == SEAL else path.name
            with pytest.raises(Damaged, match=named):
                verify(newest)
            checkpoint, remarks = newest_complete(run)
            assert checkpoint == previous, (path.name, damaged)
            assert len(remarks) == 1 and str(newest) in remarks[0], (path.name, damaged)
            tried += 1
        path.write_bytes(content)
    assert newest_complete(run) == (newest, [])
    assert tried > 200


EXTRA = ("pytorch_model.bin", "model_1.safetensors", "optimizer_1.bin", "scheduler_1.bin")
EXTRA += ("sampler.bin", "scaler.bin", "random_states_9.pkl", "custom_checkpoint_0.pkl")
EXTRA += ("dl_state_dict.bin", "pytorch_model_fsdp_0/.metadata", "optimizer_0/.DS_Store")


@pytest.mark.parametrize("name", EXTRA)
def test_an_extra_file_is_detected(name, run):
    newest, previous = checkpoints_of(run)
    (newest / name).parent.mkdir(exist_ok=True)
    (newest / name).touch()
    with pytest.raises(Damaged, match=f"{name} is not in the manifest: move it to a different"):
        verify(newest)
    assert newest_complete(run)[0] == previous


def test_every_name_that_accelerate_loads_is_known(run):
    """Find the names in the code of Accelerate's functions that load a checkpoint."""
    functions = (Accelerator.load_state, load_accelerator_state, load_custom_state)
    functions += (load_fsdp_model, load_fsdp_optimizer)
    used = {name for function in functions for name in function.__code__.co_names}
    texts = [text for function in functions for text in map(str, function.__code__.co_consts)]
    names = [getattr(constants, name) for name in used if name.endswith("_NAME")]
    names += [name for text in texts for name in re.findall(r"^/?(\w+)(?:_|\.bin)$", text)]
    assert {"model", "custom_checkpoint", "pytorch_model_fsdp", "dl_state_dict"} <= set(names)
    assert [name for name in names if not name.startswith(LOADED)] == []
    for path in checkpoints_of(run)[0].iterdir():
        assert path.name.startswith((*LOADED, MANIFEST, SEAL)), path


def test_files_that_loading_does_not_read_are_named_and_ignored(trained, run, resume, capsys):
    newest, _ = checkpoints_of(run)
    files = [".DS_Store", "._model.safetensors", ".nfs0042", ".x.swp", "Icon\r", "README"]
    files += ["desktop.ini", "manifest.json~"]
    for name in files:
        (newest / name).write_text("not read")
    (newest / "@eaDir" / "model.safetensors").mkdir(parents=True)
    (newest / "Untitled").mkdir()
    assert newest_complete(run) == (newest, [])
    for selected in ("auto", str(newest)):
        assert train_here(trained[0], run, **CHOICES, resume=selected)
        (line,) = [line for line in capsys.readouterr().out.split("\n") if "ignored" in line]
        names = ".DS_Store, ._model.safetensors, .nfs0042, .x.swp, @eaDir, Icon\\r, README"
        assert line.endswith(f": {names}, Untitled, desktop.ini, manifest.json~")


def test_hidden_files_are_not_part_of_a_checkpoint(run):
    """For example, .nfs… files exist only while another machine still uses a deleted file."""
    newest, _ = checkpoints_of(run)
    (newest / ".nfs0042").touch()
    seal_again(newest)
    (newest / ".nfs0042").unlink()
    assert newest_complete(run) == (newest, [])


def test_only_folders_with_a_manifest_or_the_name_of_a_checkpoint_are_checkpoints(run, capsys):
    for path in checkpoints_of(run):
        shutil.rmtree(path)
    (run / "checkpoints" / "@eaDir").mkdir()
    (run / "checkpoints" / "notes").mkdir()
    (run / "checkpoints" / "notes" / "model.txt").touch()
    assert newest_complete(run) == (None, [])
    (run / "checkpoints" / "epoch-0000-batch-000001").mkdir()
    assert "manifest.json is missing" in newest_complete(run)[1][0]


def test_a_manifest_from_a_different_version_is_reported(run, resume):
    newest, previous = checkpoints_of(run)
    for path in (newest, previous):
        facts = json.loads((path / MANIFEST).read_bytes())
        del facts["files"], facts["environment"]["threads_per_process"]
        for name in (MANIFEST, SEAL):
            (path / name).unlink()
        seal(path, facts)
    message = resume("auto")
    assert "manifest.json is from a different version" in message
    assert message.endswith("Choose a different --run-dir to start again.\n")


def test_a_renamed_checkpoint_keeps_its_place_in_the_order(run):
    newest, previous = checkpoints_of(run)
    renamed = newest.rename(newest.with_name("epoch-0000-batch-000000"))
    older = previous.rename(previous.with_name("epoch-0099-batch-000000"))
    assert checkpoints_of(run) == [renamed, older]
    assert newest_complete(run) == (renamed, [])


UNREADABLE = {
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to nothing": lambda path: path.symlink_to(path.parent / "nothing"),
    "a folder": lambda path: path.mkdir(),
    "a failing disk": lambda path: path.symlink_to("/proc/self/mem"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_an_unreadable_file_is_reported_in_one_sentence(kind, run):
    newest, previous = checkpoints_of(run)
    for path in sorted(newest.iterdir()):
        content = path.read_bytes()
        path.unlink()
        UNREADABLE[kind](path)
        with pytest.raises((Damaged, UserError), match=f"{path.name}|{newest.name}"):
            verify(newest)
        try:
            checkpoint, remarks = newest_complete(run)
        except UserError as error:
            assert "cannot be read" in str(error) and kind != "a link to nothing"
        else:
            assert (checkpoint, len(remarks)) == (previous, 1)
        path.rmdir() if kind == "a folder" else path.unlink()
        path.write_bytes(content)
    assert newest_complete(run) == (newest, [])


@pytest.mark.skipif(os.name != "posix", reason="needs symbolic links")
def test_files_and_links_are_not_checkpoints(run):
    newest = checkpoints_of(run)[0]
    (run / "checkpoints" / "epoch-0098-batch-000000").write_text("")
    loop = run / "checkpoints" / "epoch-0099-batch-000000"
    loop.symlink_to(loop)
    assert newest_complete(run) == (newest, [])


class Payload:
    """An object whose pickle creates the file `marker` when it is loaded."""

    def __init__(self, marker: pathlib.Path):
        self.marker = marker

    def __reduce__(self):
        return pathlib.Path.touch, (self.marker,)


def plant(path: pathlib.Path, marker: pathlib.Path) -> None:
    """Write a file that runs code when loaded with `weights_only=False`, and check that it does."""
    torch.save({"state": Payload(marker)}, path)
    torch.load(path, weights_only=False)
    marker.unlink()


def seal_again(folder: pathlib.Path) -> None:
    """Recompute the checksums, as anyone with write access to the folder could."""
    facts = json.loads((folder / MANIFEST).read_bytes())
    del facts["files"]
    for name in (MANIFEST, SEAL):
        (folder / name).unlink()
    seal(folder, facts)
    verify(folder)


@pytest.mark.parametrize("name", PICKLES)
def test_planted_code_does_not_run(name, run, resume, tmp_path):
    newest, marker = checkpoints_of(run)[0], tmp_path / "marker"
    assert (newest / name).exists()
    plant(newest / name, marker)
    assert name in resume(newest), "the wrong checksum was not detected"
    seal_again(newest)
    message = resume(newest)
    assert message.startswith(str(newest)) and not marker.exists()


def test_planted_code_in_an_extra_file_does_not_run(trained, run, resume, tmp_path):
    newest, marker = checkpoints_of(run)[0], tmp_path / "marker"
    plant(newest / "custom_checkpoint_0.pkl", marker)
    seal_again(newest)
    message = resume(newest)
    assert bool(message) == (trained[0] == "train.py")  # train_plain.py ignores the extra file
    assert not marker.exists()


@pytest.mark.parametrize("name", PICKLES)
def test_a_sealed_file_with_invalid_content_is_reported_in_one_line(name, run, resume):
    newest = checkpoints_of(run)[0]
    original = (newest / name).read_bytes()
    for content in (b"", b"\0", original[:100], original[:-100], bytes(5000)):
        (newest / name).write_bytes(content)
        seal_again(newest)
        assert resume(newest).startswith(str(newest)), content
    for value in ([1], {}, 1, "text", None):
        torch.save(value, newest / name)
        seal_again(newest)
        assert resume(newest).startswith(str(newest)), value
