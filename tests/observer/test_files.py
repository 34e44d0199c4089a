"""Test that files which an observed script overwrites can be put back."""

import os
import resource
import shutil
import tempfile
import threading
import time
from pathlib import Path

import pytest

from accel_demo.lab.audit.checks import files
from accel_demo.lab.audit.result import NOTE, WARNING
from accel_demo.observer.copies import Restored, protect, remove_copies, restore
from tests.conftest import run_ranks
from tests.observer.test_checks import OBSERVED, observe

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
    os.makedirs(".", exist_ok=True)
    os.makedirs("checkpoint-old/", exist_ok=True)
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


LEAVES = """
import os, torch
from multiprocessing.connection import Listener

listener = Listener(family="AF_UNIX")  # as the forkserver has one, in a temporary folder
open("result.txt", "w").close()
os._exit(0)
"""


def test_the_temporary_folder_of_multiprocessing_is_not_listed(tmp_path):
    folder, events = tmp_path / "work", tmp_path / "events"
    for path in (folder, events):
        path.mkdir()
    (folder / "script.py").write_text(LEAVES)
    with tempfile.TemporaryDirectory() as temporary:  # paths of sockets must be short
        script = [OBSERVED, Path("script.py")]
        run_ranks(script, 2, cwd=folder, ACCEL_DEMO_AUDIT=str(events), TMPDIR=temporary)
        assert list(Path(temporary).glob("pymp-*/listener-*"))
        assert restore(str(events)) == Restored(new=[str(folder / "result.txt")])


TOUCHES = """
import os, torch
from pathlib import Path

try:
    open("exclusive.txt", "x")
except FileExistsError:
    Path("exclusive.txt").write_text("new")
os.remove("latest")
os.symlink("checkpoint-2", "latest")
os.chmod("mode.txt", 0o644)
Path("mode.txt").write_text("new")
Path("first-name.txt").write_text("new")
Path("second-name.txt").write_text("newer")
os.rename("links", "links-old")
os.rmdir("empty")
os.link("linked.txt", "other-name.txt")
Path("other-name.txt").write_text("new")
os.close(os.open("cut.txt", os.O_RDONLY | os.O_TRUNC))
torch.jit.script(torch.nn.Linear(2, 2)).save("module.pt")
torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(2),)), "program.pt2")
os.mkdir("scratch")
os.system("touch scratch/of-another-program.txt")
os.remove("scratch/of-another-program.txt")
if os.fork() == 0:  # as a loader worker, whose events are not recorded
    torch.save(torch.ones(2), "worker.pt")
    os._exit(0)
os.wait()
"""


def test_links_and_files_with_other_names_or_a_new_mode_are_put_back(tmp_path):
    folder, events = tmp_path / "work", tmp_path / "events"
    names = ["exclusive.txt", "mode.txt", "first-name.txt", "linked.txt", "cut.txt"]
    names += ["module.pt", "program.pt2", "worker.pt"]
    for path in (events, folder / "checkpoint-1", folder / "empty", folder / "links"):
        path.mkdir(parents=True)
    for name in names:
        (folder / name).write_text(f"original {name}")
    os.link(folder / "first-name.txt", folder / "second-name.txt")
    for link in (folder / "latest", folder / "links" / "best"):
        link.symlink_to(folder / "checkpoint-1")
    (folder / "script.py").write_text(TOUCHES)
    result = run_ranks(
        [OBSERVED, folder / "script.py"], 1, cwd=folder, ACCEL_DEMO_AUDIT=str(events)
    )
    assert result.returncode == 0, result.stderr
    assert (folder / "second-name.txt").read_text() == "newer"

    restored = restore(str(events))
    assert restored.failed == {}
    assert [os.path.basename(path) for path in restored.new] == ["links-old", "other-name.txt"]
    assert {name: (folder / name).read_text() for name in [*names, "second-name.txt"]} == {
        name: f"original {name}" for name in names
    } | {"second-name.txt": "original first-name.txt"}
    assert os.path.samefile(folder / "first-name.txt", folder / "second-name.txt")
    for link in (folder / "latest", folder / "links" / "best"):
        assert os.readlink(link) == str(folder / "checkpoint-1")
    assert (folder / "empty").is_dir()
    assert os.listdir(folder / "scratch") == []


@pytest.fixture
def protected(tmp_path, monkeypatch):
    """Return a folder with files that `protect` has copied, and the folder of the audit."""
    folder, events = tmp_path / "work", tmp_path / "events"
    monkeypatch.setenv("ACCEL_DEMO_AUDIT", str(events))
    (folder / "folder").mkdir(parents=True)
    for name in ("a.txt", "model", "folder/b.txt", "z.txt"):
        (folder / name).write_text("original")
        protect(str(folder / name))
    return folder, events


def test_a_file_that_cannot_be_put_back_is_named_and_the_others_are_put_back(protected):
    folder, events = protected
    for name in ("a.txt", "z.txt"):
        (folder / name).write_text("new")
    (folder / "model").unlink()
    (folder / "model").mkdir()
    shutil.rmtree(folder / "folder")
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "b.txt").write_text("another file")
    (folder / "folder").symlink_to("elsewhere")

    restored = restore(str(events))
    assert [os.path.basename(path) for path in restored.changed] == ["a.txt", "z.txt"]
    assert (folder / "z.txt").read_text() == "original"
    assert "is a folder now" in restored.failed[str(folder / "model")]
    assert "is a link now" in restored.failed[str(folder / "folder/b.txt")]
    assert (folder / "elsewhere" / "b.txt").read_text() == "another file"
    assert sorted(os.listdir(folder)) == ["a.txt", "elsewhere", "folder", "model", "z.txt"]
    remove_copies(str(events), restored.kept)
    assert [Path(copy).read_text() for copy in restored.kept] == ["original", "original"]
    assert len(os.listdir(events / "files")) == 2


def test_a_file_that_cannot_be_copied_is_named_with_the_reason(protected):
    folder, events = protected
    (folder / "large.bin").write_bytes(bytes(100_000))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        protect(str(folder / "large.bin"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    reason = restore(str(events)).failed[str(folder / "large.bin")]
    assert reason == "it could not be copied: File too large"
    assert {name.rpartition(".")[2] for name in os.listdir(events / "files")} == {
        "path",
        "copy",
        "inode",
        "lost",
    }


def test_a_second_thread_waits_until_the_file_is_copied(protected, monkeypatch):
    folder, events = protected
    (folder / "large.bin").write_text("original")
    copy2, first_copies = shutil.copy2, threading.Event()

    def slow_copy(*args, **kwargs):
        if not first_copies.is_set():
            first_copies.set()
            time.sleep(0.2)
        return copy2(*args, **kwargs)

    monkeypatch.setattr(shutil, "copy2", slow_copy)
    thread = threading.Thread(target=protect, args=[str(folder / "large.bin")])
    thread.start()
    assert first_copies.wait(5)
    protect(str(folder / "large.bin"))
    (folder / "large.bin").write_text("new")
    thread.join()
    restore(str(events))
    assert (folder / "large.bin").read_text() == "original"


FULL = """
import os, sys, torch
from accel_demo.observer import events
open("a.txt", "w").close()  # the first event opens the log
os.dup2(os.open("/dev/full", os.O_WRONLY), events._Log.file)
open("b.txt", "w").close()
torch.save(torch.ones(2), "saved.pt")
"""


def test_events_that_cannot_be_written_do_not_stop_the_script(tmp_path):
    folder, events = tmp_path / "work", tmp_path / "events"
    for path in (folder, events):
        path.mkdir()
    (folder / "saved.pt").write_text("original")
    (folder / "script.py").write_text(FULL)
    result = run_ranks([OBSERVED, "script.py"], 1, cwd=folder, ACCEL_DEMO_AUDIT=str(events))
    assert result.returncode == 0, result.stderr
    assert len(list(events.glob("*.lost"))) == 1
    restore(str(events))
    assert (folder / "saved.pt").read_text() == "original"


IN_TURN = """
import os, tempfile, torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
for turn in range(2):
    if turn == rank:
        with open("in-turn.txt", "a") as file:
            file.write("a line")
    dist.barrier()
with open(f"cache.{rank}.tmp", "w") as file:
    file.write("the same on all ranks")
os.replace(f"cache.{rank}.tmp", "cache.json")
with tempfile.NamedTemporaryFile("w", dir=".") as file:
    file.write("scratch")
os.makedirs(f"{os.environ['XDG_CACHE_HOME']}/library", exist_ok=True)
open(f"{os.environ['XDG_CACHE_HOME']}/library/index", "w").close()
with open("at-once.txt", "a") as file:
    file.write("a line")
for name in ("empty.txt", "full.txt"):
    open(name, "a").close()
with open("was-empty.txt", "a") as file:
    file.write("a line")
torch.nn.Linear(1, 1)(torch.ones(1)).backward()
dist.destroy_process_group()
"""


def test_only_files_that_ranks_write_at_once_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, content in (("full.txt", "a line"), ("was-empty.txt", "")):
        (tmp_path / name).write_text(content)
    evidence = observe(IN_TURN, tmp_path)
    restore(str(tmp_path / "events"))  # as the audit does before the checks
    findings = list(files.check(evidence))
    assert [(each.verdict, each.sentence.split("/")[-1]) for each in findings] == [
        (WARNING, "at-once.txt: their lines are mixed."),
        (NOTE, "cache.json. The last one wins."),
        (WARNING, "was-empty.txt: their lines are mixed."),
    ]
    assert not any(evidence.counts("fault"))
