"""Test `accel-demo audit`: what it starts and prints, and that it leaves nothing behind."""

import json
import os
import re
import signal
import time
import venv
from contextlib import contextmanager
from pathlib import Path

import jsonschema
import psutil
import pytest
import torch

from accel_demo.lab import audit as package
from accel_demo.lab.audit import checks
from accel_demo.lab.observed.launches import command_for
from accel_demo.lab.observed.ranks import Rank
from tests.conftest import (
    REPOSITORY,
    left_behind,
    processes_below_this_one,
    run_to_end,
    start_process,
)
from tests.observer.test_checks import FAULTS, SCRIPTS, text_of

SCHEMA = Path(package.__file__).with_name("schema.json")
SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

{begin}
data = TensorDataset(torch.arange(1600.0).reshape(400, 4))
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.001)
for epoch in range(50):
    for (inputs,) in DataLoader(data, batch_size=2, shuffle=True):
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "best.pt")
{end}
"""
IN_A_FUNCTION = SCRIPT.replace("\n", "\n    ")
TRAIN = IN_A_FUNCTION.format(
    begin='dist.init_process_group("gloo")', end="dist.destroy_process_group()"
)
# A group's threads end only if this import precedes it. Otherwise, a process may abort at exit.
ENDS_THREADS = "import torch.distributed.nn.functional\n"
UNDER_TORCHRUN = f"""{ENDS_THREADS}def main():{TRAIN}
main()
"""

ACCELERATE = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no"
ACCELERATE += " --dynamo_backend no --main_process_port 0"


def test_every_check_points_to_a_page():
    for module in Path(checks.__file__).parent.glob("[a-z]*.py"):
        pages = re.findall('PAGE = "(.*?)"', module.read_text())
        assert pages, module
        assert all((REPOSITORY / "tutorials" / f"{page}.md").exists() for page in pages), module


def audit(folder: Path, *arguments, timeout=100, real=True, **environment):
    command = ["accel-demo", "audit", *arguments]
    return run_to_end(command, timeout, cwd=folder, real=real, **environment)


def test_a_script_started_by_torchrun_is_observed_and_its_files_are_put_back(tmp_path):
    (tmp_path / "train.py").write_text(UNDER_TORCHRUN)
    (tmp_path / "best.pt").write_text("the best model so far")
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("print('own sitecustomize')")
    result = audit(tmp_path, "--json", "out.json", "train.py", PYTHONPATH=str(own))
    assert result.returncode == 1, result.stderr
    assert "error: Each rank reads all 400 samples" in result.stdout
    assert "train.py:14 (all ranks)" in result.stdout
    assert "put back: best.pt" in result.stdout
    assert "checked in 2 processes: connected processes, " in result.stdout
    assert "seen: at most 20 optimizer steps, 21 batches" in result.stdout
    assert (tmp_path / "best.pt").read_text() == "the best model so far"
    report = json.loads((tmp_path / "out.json").read_text())
    jsonschema.validate(report, json.loads(SCHEMA.read_text()))
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    assert [finding["check"] for finding in report["findings"]] == ["samples"]
    log = Path(result.stderr.split("its output: ")[1].split("\n")[0]).read_text()
    assert log.count("own sitecustomize") == 3  # torchrun and two ranks


def write_spawning_script(path: Path) -> None:
    text = IN_A_FUNCTION.format(
        begin='dist.init_process_group("gloo", rank=rank, world_size=2)', end=""
    )
    path.write_text(f"""def train(rank):{text}
if __name__ == "__main__":
    import os
    os.environ |= {{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}}
    import socket
    import torch.multiprocessing
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    torch.multiprocessing.spawn(train, nprocs=2)
""")


@pytest.mark.slow
def test_a_script_that_spawns_its_processes_is_observed(tmp_path):
    write_spawning_script(tmp_path / "spawns.py")
    result = audit(tmp_path, "--", "python", "spawns.py")
    assert result.returncode == 1, result.stderr
    assert "error: Each rank reads all 400 samples" in result.stdout
    assert "new: best.pt" in result.stdout


@pytest.mark.slow
def test_a_script_that_spawns_its_processes_is_not_started_twice(tmp_path):
    write_spawning_script(tmp_path / "spawns.py")
    result = audit(tmp_path, "spawns.py")
    assert result.returncode == 2
    assert "error: the script starts its processes itself" in result.stderr


ACCELERATED = """
import torch
from accelerate import Accelerator, debug_launcher, notebook_launcher
from torch.utils.data import DataLoader, TensorDataset

def train():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    data = TensorDataset(torch.arange(1600.0).reshape(400, 4))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    loader = DataLoader(data, batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (inputs,) in loader:
        accelerator.backward(model(inputs).sum())
        STEPS

if __name__ == "__main__":
    START
"""


def accelerated(steps: str, start: str) -> str:
    return ACCELERATED.replace("STEPS", steps).replace("START", start)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["notebook_launcher", "debug_launcher"])
@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ("optimizer.step(); optimizer.zero_grad()", []),
        ("optimizer.zero_grad(); optimizer.step()", ["thrown"]),
    ],
)
def test_scripts_that_use_a_launcher_of_accelerate_are_observed(launcher, steps, found, tmp_path):
    text = accelerated(steps, f"{launcher}(train, num_processes=2)")
    (tmp_path / "train.py").write_text(text)
    result = audit(tmp_path, "--json", "out.json", "--", "python", "train.py")
    assert result.returncode == bool(found), result.stdout + result.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert [finding["check"] for finding in report["findings"]] == found
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    assert "connected" in report["checked"]
    assert all(rank["optimizer_steps"] >= 8 for rank in report["ranks"])


@pytest.mark.slow
def test_a_python_without_this_package_is_observed(tmp_path):
    venv.create(tmp_path / "other")
    [packages] = (tmp_path / "other/lib").glob("python*/site-packages")
    (packages / "others.pth").write_text(str(Path(torch.__file__).parents[1]))
    (packages / "accel_demo.py").write_text('raise ImportError("not here")')
    steps = "optimizer.zero_grad(); optimizer.step()"
    (tmp_path / "train.py").write_text(accelerated(steps, "train()"))
    python = tmp_path / "other/bin/python"
    without = run_to_end([python, "-c", "import accel_demo"], 20, cwd=tmp_path)
    assert "not here" in without.stderr
    result = audit(tmp_path, "--json", "out.json", "-n", "2", "--", str(python), "train.py")
    assert result.returncode == 1, result.stdout + result.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert [finding["check"] for finding in report["findings"]] == ["thrown"]
    assert len(report["ranks"]) == 2


@pytest.mark.system
def test_a_script_in_a_read_only_folder_is_observed(tmp_path):
    """Root may write to each folder, but not to a file system that is mounted read-only."""
    (tmp_path / "train.py").write_text(UNDER_TORCHRUN)
    mount = 'mount --bind . . && mount -o remount,bind,ro . && cd "$PWD"'
    command = ["unshare", "--mount", "sh", "-c", f"{mount} && exec accel-demo audit train.py"]
    result = run_to_end(command, 100, cwd=tmp_path, real=True)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "Read-only file system" in result.stdout
    assert 'torch.save(model.module.state_dict(), "best.pt")' in result.stdout
    assert "error: Each rank reads all 400 samples" in result.stdout
    assert os.listdir(tmp_path) == ["train.py"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SCRIPTS, *FAULTS])
def test_launched_scripts_get_the_findings_of_forked_ones(name, tmp_path):
    entry = FAULTS.get(name) or SCRIPTS[name]
    script = text_of(entry)
    command = ["--", "accelerate", "launch", *ACCELERATE.split(), "train.py"]
    if "Accelerator" not in script:
        script = ENDS_THREADS + script
        command = ["--", "torchrun", "--nproc-per-node", "2", "train.py"]
    (tmp_path / "train.py").write_text(script)
    result = audit(tmp_path, "--json", "out.json", *command)
    is_note = name in FAULTS and entry.get("verdict") == "note"
    assert result.returncode == (name in FAULTS and not is_note), result.stdout + result.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert len(report["ranks"]) == 2
    found = [each for each in report["findings"] if is_note or each["verdict"] != "note"]
    if name in FAULTS:
        assert {finding["check"] for finding in found} == {entry["check"]}
        assert entry["line"] in [place["text"] for each in found for place in each["places"]]


@pytest.mark.parametrize(
    ("words", "processes", "command"),
    [
        ("train.py --steps 9", None, "python LAUNCHER 2 train.py --steps 9"),
        ("python3 -u -X dev train.py", 3, "python3 -u -X dev LAUNCHER 3 train.py"),
        ("python -u train.py", None, "python -u train.py"),
        ("python -W ignore -m a.b", 2, "python -W ignore LAUNCHER 2 -m a.b"),
        ("torchrun --nproc-per-node 2 train.py", None, "torchrun --nproc-per-node 2 train.py"),
    ],
)
def test_only_python_scripts_get_a_launcher(words, processes, command):
    launcher = "-m torch.distributed.run --nproc-per-node"
    port = "--rdzv-backend c10d --rdzv-endpoint localhost:0"
    expected = re.sub(r"LAUNCHER (\d)", rf"{launcher} \1 {port}", command)
    assert command_for(words.split(), processes) == expected.split()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which script? For example: accel-demo audit train.py"),
        (["train"], "put -- before a command"),
        (["absent.py"], "there is no file absent.py"),
        (["--stops", "3", "train.py"], "unrecognized arguments: --stops"),
        (["--", "absent"], "there is no program absent"),
        (["--", "python", "-I", "train.py"], "ignores PYTHONPATH"),
        (["-n", "2", "--", "torchrun", "train.py"], "--processes needs a Python script"),
        (["-n", "0", "train.py"], "--processes must be from 1 to 16, got 0"),
        (["--steps", "-1", "train.py"], "--steps must be at least 0"),
        (["--timeout", "0", "train.py"], "--timeout must be above 0"),
        (["--", "python", "-c", "print('hello')"], "no training process has reported"),
        (["--", "python", "-c", "import missing"], "No module named 'missing'"),
        (["--", "env", "PYTHONPATH=/x", "python", "train.py"], "they ignore PYTHONPATH"),
        (["--", "python", "ranks.py"], "the script needs a launcher"),
        (["--", "sh", "-c", "setsid sleep 1000 &"], "no training process has reported"),
        (["--json", "absent/out.json", "train.py"], "cannot write --json absent/out.json"),
    ],
)
def test_bad_input_gets_one_line(arguments, message, tmp_path):
    (tmp_path / "train.py").write_text("print('hello')")
    (tmp_path / "ranks.py").write_text("import os, torch\nrank = os.environ['LOCAL_RANK']\n")
    before = processes_below_this_one()
    result = audit(tmp_path, *arguments)
    assert not left_behind(before)
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.returncode == 2 and len(lines) == 1 and message in lines[0], result.stderr


def test_the_result_says_if_nothing_was_trained(tmp_path):
    script = "from accelerate import PartialState; PartialState(cpu=True).wait_for_everyone()"
    (tmp_path / "evaluate.py").write_text(script)
    result = audit(tmp_path, "evaluate.py")
    printed = result.stdout.splitlines()
    assert result.returncode == 0, result.stderr
    assert "no errors, no warnings, but no optimizer step was seen" in printed


def test_the_result_says_if_the_launcher_started_only_one_process(tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "from accelerate import Accelerator\n"
        "model = torch.nn.Linear(1, 1)\n"
        "model, optimizer = Accelerator().prepare(model, torch.optim.SGD(model.parameters()))\n"
        "model(torch.ones(1)).sum().backward()\n"
        "optimizer.step()\n"
    )
    result = audit(tmp_path, "--", "accelerate", "launch", "--num_processes", "2", "train.py")
    expected = "no errors, no warnings, but there was only one process: nothing was compared"
    assert expected in result.stdout.splitlines(), result.stdout + result.stderr
    assert "\nchecked in 1 process: " in result.stdout


def test_a_second_audit_in_the_same_folder_is_refused(tmp_path):
    command = ["accel-demo", "audit", "--", "python", "-c", "import time; time.sleep(60)"]
    with open(tmp_path / "output.txt", "w+") as output:
        first = start_process(command, output, output, cwd=tmp_path, real=True)
        try:
            wait_for_text(tmp_path / "output.txt", "its output")
            time.sleep(1)
            second = audit(tmp_path, "--", "python", "-c", "print(1)")
            assert second.returncode == 2
            assert "another audit is running in this folder" in second.stderr
        finally:
            first.send_signal(signal.SIGINT)
            assert first.wait(20) == 130


SLEEPS = """
import os, signal, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("x" * 5_000_000)
with open("best.pt", "w") as file:
    file.write("overwritten")
if os.fork() == 0:  # a daemon
    os.setsid()
Path(f"pid-{os.getpid()}").touch()
while True:
    time.sleep(0.01)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_after_an_audit_was_stopped_nothing_runs_and_the_files_are_put_back(number, tmp_path):
    with audit_of_sleeping_script(tmp_path) as (process, keeper):
        keeper.suspend()
        process.send_signal(number)
        if number != signal.SIGKILL:  # nobody is too impatient for the keeper
            time.sleep(0.3)
            process.send_signal(number)
            time.sleep(0.3)
            assert process.poll() is None
        keeper.resume()
        code = process.wait(20)
    assert code == {signal.SIGKILL: -9}.get(number, 130)


def test_after_the_keeper_was_killed_nothing_runs_and_the_files_are_put_back(tmp_path):
    with audit_of_sleeping_script(tmp_path) as (process, keeper):
        keeper.kill()
        assert process.wait(20) == 2
    lines = (tmp_path / "output.txt").read_text().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1 and "the audit's own process was killed" in errors[0]


@contextmanager
def audit_of_sleeping_script(folder: Path):
    """Yield a running audit and its keeper. At the end, assert that all has been cleaned up."""
    before = processes_below_this_one()
    (folder / "best.pt").write_text("the best model so far")
    (folder / "sleeps.py").write_text(SLEEPS)
    with open(folder / "output.txt", "w+") as output:
        command = ["accel-demo", "audit", "--", "setsid", "python", "sleeps.py"]
        process = start_process(command, output, output, cwd=folder, real=True)
        wait_for(lambda: len(list(folder.glob("pid-*"))) == 2)
        assert (folder / "best.pt").read_text() == "overwritten"
        children = psutil.Process(process.pid).children()
        keeper = next(
            each for each in children if "accel_demo.lab.observed.keeper" in each.cmdline()
        )
        yield process, keeper
    wait_for(lambda: (folder / "best.pt").read_text() == "the best model so far")
    pids = [int(file.name.removeprefix("pid-")) for file in folder.glob("pid-*")]
    wait_for(lambda: not any(map(is_running, pids)))
    assert not left_behind(before)
    log = Path(re.search("its output: (.*)", (folder / "output.txt").read_text())[1])
    assert os.listdir(log.parent) == ["output.txt"]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_text(path: Path, text: str) -> None:
    wait_for(lambda: text in path.read_text())


def wait_for(is_true, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_rank_waits_in_init_process_group_until_it_is_connected_or_has_failed():
    begun, failed = (
        {"kind": "connecting", "line": ["train.py", 1, "main"]},
        {"kind": "not connected"},
    )
    expected = {"name": "init_process_group", "number": None, "line": begun["line"]}
    assert Rank(1, 0, 2, [begun]).waits_in == expected
    assert Rank(1, 0, 2, [begun, failed]).waits_in is None
    assert Rank(1, 0, 2, [begun, failed, begun]).waits_in == expected


HANGS = {  # what rank 0 or both do first, and what both do then
    "a skipped collective": ("if rank == 0: dist.all_reduce(value)", "dist.barrier()"),
    "different collectives": (
        "dist.all_reduce(value) if rank == 0 else dist.all_gather([value, value], value)",
        "dist.barrier()",
    ),
    "evaluation on one rank": ("if rank == 0: model(torch.ones(4, 4))", "dist.barrier()"),
    "two receivers": ("dist.recv(value, src=1 - rank)", ""),
    "a rank that leaves": ("if rank == 0: dist.all_reduce(value)", ""),
    "a group with one member missing": (
        "group = dist.new_group([0, 1]) if rank == 0 else None",
        "dist.barrier()",
    ),
}
HANGING = """
import os
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
layers = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
model = DDP(torch.nn.Sequential(*layers))
torch.manual_seed(rank)
model(torch.randn(4, 4)).sum().backward()
value = torch.ones(3)
FIRST
SECOND
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", HANGS)
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_a_hang_is_named_with_its_line(name, launcher, tmp_path):
    first, second = HANGS[name]
    text = HANGING.replace("FIRST", first).replace("SECOND", second)
    (tmp_path / "train.py").write_text(text)
    command = ["train.py"]
    if launcher == "accelerate":
        command = ["--", "accelerate", "launch", *ACCELERATE.split(), "train.py"]
    result = audit(tmp_path, "--json", "out.json", *command)
    assert result.returncode == 1, result.stdout + result.stderr
    assert first in result.stdout
    report = json.loads((tmp_path / "out.json").read_text())
    jsonschema.validate(report, json.loads(SCHEMA.read_text()))
    assert len(report["ranks"]) == 2
    assert report["hang"] == (name != "a rank that leaves")
    assert not report["hang"] or report["seconds_to_notice"] < 20


BATCH_NORM = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.randn(8, 4)).square().sum().backward()
optimizer.step()
model.eval()
with torch.no_grad():
    model(torch.randn(8, 4))
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), "best.pt")
dist.barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize("evaluates", [True, False])
def test_buffers_that_differ_when_saved_are_noted_unless_an_evaluation_has_sent_them(
    evaluates, tmp_path
):
    before, evaluation = BATCH_NORM.split("model.eval()")
    after = evaluation if evaluates else evaluation[evaluation.index("if dist") :]
    (tmp_path / "train.py").write_text(before + ("model.eval()" if evaluates else "") + after)
    result = audit(tmp_path, "train.py")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "BatchNorm1d: each rank normalizes with the mean" in result.stdout
    assert ("the buffers of the model, such as running means, differ" in result.stdout) != evaluates


@pytest.mark.slow
def test_files_are_put_back_after_audits_that_were_killed_at_random_moments(tmp_path):
    (tmp_path / "train.py").write_text(UNDER_TORCHRUN)
    (tmp_path / "best.pt").write_text("the best model so far")
    before = processes_below_this_one()
    for number in range(20):
        with open(tmp_path / f"output-{number}.txt", "w+") as output:
            command = ["accel-demo", "audit", "--steps", "0", "train.py"]
            process = start_process(command, output, output, cwd=tmp_path, real=True)
            time.sleep(1 + 0.5 * number)
            os.kill(process.pid, signal.SIGKILL)
            process.wait(10)
        assert not left_behind(before)
        assert (tmp_path / "best.pt").read_text() == "the best model so far"
