"""Test the observer in a new Python process, as `accel-demo nodes` starts it."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import accel_demo
from accel_demo.lab.nodes.members import read_members
from accel_demo.observer import agent
from accel_demo.observer.events import NODE_FOLDER, belongs_to_script, read_events

SCRIPT = """
import sys, torch, torch.distributed as dist
from accelerate import Accelerator
for place in ({"rank": 7, "world_size": 9}, {"rank": 7}):
    try: dist.init_process_group("gloo", init_method="no-such://", **place)
    except Exception as error: print(type(error).__name__)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for batch in torch.utils.data.DataLoader(torch.ones(2, 1)):
    model(batch).sum().backward()
    optimizer.step()
torch.save(model.state_dict(), "model.pt")
accelerator = Accelerator()
accelerator.prepare(model)
assert dist.is_initialized() and sys.argv[1] not in sys.path
dist.destroy_process_group()
dist.init_device_mesh("cpu", (1,))
Accelerator()
"""
PROCESS = {"kind": "process", "time": 1.0, "pid": 1, "variables": {}}
PLACE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


def test_on_a_node_only_groups_accelerators_and_the_first_step_are_recorded(tmp_path):
    """The functions return and raise the same as before, and no module or file is changed."""
    (tmp_path / "sitecustomize.py").write_text("print('the sitecustomize of the user')")
    (tmp_path / "model.pt").write_text("the best model")
    folder = tmp_path / "events"
    folder.mkdir()
    changes = {"PYTHONPATH": str(tmp_path), "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "true"}
    environment = agent.inject(os.environ | PLACE | changes, NODE_FOLDER, str(folder))
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, agent.INJECT],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    printed = ended.stdout.splitlines()
    assert printed == ["the sitecustomize of the user", "RuntimeError", "RuntimeError"]
    [events] = read_events(str(folder))
    [name] = os.listdir(folder)  # no copy of model.pt, no pipe, no file of faulthandler
    assert name == f"{events[0]['pid']}.jsonl"
    fields = ("kind", "rank", "world", "is_plain", "processes")
    known = [[event[field] for field in fields if field in event] for event in events]
    assert known == [
        ["process"],
        ["connecting", 7, 9],
        ["not connected"],
        ["connecting", None, None],
        ["not connected"],
        ["step"],
        ["connecting", 0, 1],
        ["connected", 0, 1],
        ["accelerator", True, 1],
        ["connecting", 0, 1],
        ["connected", 0, 1],
        ["accelerator", False, 1],
    ]


def test_a_line_that_is_not_complete_is_not_read(tmp_path):
    whole = json.dumps(PROCESS)
    (tmp_path / "1.jsonl").write_text(f'{whole}\n{{"kind": "st')
    (tmp_path / "2.jsonl").write_text('{"ki')
    assert read_events(str(tmp_path)) == [[PROCESS]]


def test_a_damaged_line_is_a_lost_event_and_the_others_are_read(tmp_path):
    step = {"kind": "step", "time": 2.0}
    lines = [json.dumps(PROCESS), '{"kind": "st{"kind": "step"}', "3", json.dumps(step), ""]
    (tmp_path / "1.jsonl").write_text("\n".join(lines))
    (tmp_path / "1.lost").touch()
    (tmp_path / "2.lost").touch()
    first, second = sorted(read_events(str(tmp_path)), key=lambda events: events[0]["pid"])
    assert [event["kind"] for event in first] == ["process", "lost", "lost", "step", "lost"]
    assert [event["time"] for event in first] == [1.0, 1.0, 1.0, 2.0, 2.0]
    assert [event["kind"] for event in second] == ["process", "lost"]
    members = read_members([first, second], running=[])
    assert [(member.pid, member.trains) for member in members] == [(1, True), (2, False)]


def test_the_observer_is_never_a_part_of_the_script():
    package = str(Path(accel_demo.__file__).parent) + os.sep
    script = partial(belongs_to_script, libraries=[package], script_folder=package)
    assert script(f"{package}train_ddp.py") and script("train.py")
    assert not script(f"{package}observer/files.py") and not script("<string>")
    assert not belongs_to_script(f"{package}train_ddp.py", [package], "")
