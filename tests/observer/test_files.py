"""Test that files which an observed script overwrites can be put back."""

import os
from pathlib import Path

from accel_demo.observer.copies import Restored, restore
from tests.conftest import run_ranks
from tests.observer.test_checks import OBSERVED

SCRIPT = """
import os
import shutil
import numpy
import torch
import torch.distributed as dist
from pathlib import Path

dist.init_process_group("gloo")
rank = dist.get_rank()
Path("everyone.txt").write_text(f"new {rank}")
torch.save(torch.ones(3), "saved.pt")
with open("log.txt", "a") as file:
    file.write("more")
if rank == 0:
    Path("part.txt").write_text("new")
    os.replace("part.txt", "replaced.txt")
    os.remove("removed.txt")
    os.truncate("truncated.txt", 1)
    shutil.rmtree("folder")
    os.rename("checkpoint", "checkpoint-old")
    os.remove("latest")
    os.symlink("everyone.txt", "latest")
    numpy.save("array.npy", numpy.zeros(2))
    Path("created.txt").write_text("new")
dist.barrier()
"""
NAMES = ["everyone.txt", "saved.pt", "log.txt", "replaced.txt", "removed.txt", "truncated.txt"]
NAMES += ["array.npy", "folder/inner/file.txt", "checkpoint/model.bin"]


def test_all_files_that_a_script_changes_are_put_back_and_new_ones_are_listed(tmp_path):
    folder, events = tmp_path / "work", tmp_path / "events"
    events.mkdir()
    for name in NAMES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"original {name}")
    (folder / "latest").symlink_to("saved.pt")
    (folder / "script.py").write_text(SCRIPT)
    arguments = [OBSERVED, folder / "script.py"]
    result = run_ranks(arguments, 2, cwd=folder, ACCEL_DEMO_AUDIT=str(events))
    assert result.returncode == 0, result.stderr
    assert (folder / "everyone.txt").read_text().startswith("new")
    assert not (folder / "folder").exists()

    restored = restore(str(events))
    assert restored.failed == {} and restored.kept == []

    def names(paths):
        return sorted(os.path.relpath(path, folder) for path in paths)

    assert names(restored.new) == ["checkpoint-old", "created.txt"]
    assert names(restored.changed) == sorted([*NAMES, "latest"])
    assert {name: (folder / name).read_text() for name in NAMES} == {
        name: f"original {name}" for name in NAMES
    }
    assert os.readlink(folder / "latest") == "saved.pt"


def test_files_that_were_only_read_or_rewritten_by_nobody_are_not_touched(tmp_path):
    folder, events = tmp_path / "work", tmp_path / "events"
    for path in (folder, events):
        path.mkdir()
    (folder / "data.txt").write_text("original")
    (folder / "script.py").write_text("import torch\nopen('data.txt').read()\n")
    result = run_ranks([OBSERVED, Path("script.py")], 2, cwd=folder, ACCEL_DEMO_AUDIT=str(events))
    assert result.returncode == 0, result.stderr
    assert restore(str(events)) == Restored()
