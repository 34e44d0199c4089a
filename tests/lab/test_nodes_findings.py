"""Test what `accel-demo nodes` says about processes that are not connected, or that wait."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from accel_demo.errors import UserError
from accel_demo.lab import cables
from accel_demo.lab.nodes import command, findings, supervisor
from accel_demo.lab.nodes.keeper import AGENT
from accel_demo.lab.nodes.members import LOG, NodeState, read_members

FIELD = Path(__file__).with_name("field")  # short scripts that people write, each with a fault
missing = cables.why_not()
namespaces = pytest.param(
    "namespaces",
    marks=[pytest.mark.system, pytest.mark.skipif(missing is not None, reason=str(missing))],
)
both_networks = pytest.mark.parametrize("network", ["loopback", namespaces])


def log(*events: tuple) -> list[str]:
    """Return the lines that processes log. An event is (pid, name) or (pid, name, rank, size)."""
    names = ("pid", "event", "rank", "world_size")
    return [json.dumps(dict(zip(names, event, strict=False))) for event in events]


def state(*events: tuple, running: bool = False, **others) -> NodeState:
    """Return the state of a node whose processes have logged the events."""
    pids = [event[0] for event in events] if running else []
    return NodeState(read_members(log(*events), pids), len(set(pids)), **others)


def group(size: int, *ranks: int) -> list[tuple]:
    """Return the events of processes that join a group, with their ranks as their IDs."""
    joins = [(rank, "joins", rank, size) for rank in ranks]
    return joins + [(rank, "has joined", rank, size) for rank in ranks]


# --- the lines


def test_two_groups_of_two_nodes_are_told_from_one():
    own = group(2, 0, 1)
    line = "separate process groups: 2 processes on node 0, 2 on node 1; "
    line += "none had processes of two nodes"
    assert findings.at_end([state(*own), state(*own)]) == [line]
    without_traffic = [state(*own, bytes_sent=0), state(*own, bytes_sent=0)]
    zero = ", and the nodes sent each other 0 bytes"
    assert findings.at_end(without_traffic) == [line + zero]
    assert findings.at_end([state(*own, bytes_sent=0), state(*own, bytes_sent=1)]) == [line]
    assert findings.at_end([state(*group(4, 0, 1)), state(*group(4, 2, 3))]) == []
    assert findings.at_end([state(*own), state()]) == []
    # After a restart, the nodes may have changed places.
    changed = [state(*group(4, 0, 1), *group(4, 2, 3)), state(*group(4, 2, 3), *group(4, 0, 1))]
    assert findings.at_end(changed) == []
    # The same processes also join a group of all nodes, later or earlier.
    common = [(0, "joins", 2, 4), (1, "joins", 3, 4)]
    common += [(0, "has joined", 2, 4), (1, "has joined", 3, 4)]
    assert findings.at_end([state(*own, *group(4, 0, 1)), state(*own, *common)]) == []
    assert findings.at_end([state(*group(4, 0, 1), *own), state(*common, *own)]) == []


def test_processes_that_train_alone_are_clones():
    alone = state((1, "trains"), (2, "trains"))
    line = "trained alone: 2 processes on node 0, 2 on node 1; "
    assert findings.at_end([alone, alone]) == [f"{line}torch.distributed did not connect them"]
    assert findings.at_end([state((1, "trains")), state()]) == []
    single = state((1, "trains"), (1, "joins", 0, 1), (1, "has joined", 0, 1), (2, "trains"))
    assert findings.at_end([single, single]) == [f"{line}torch.distributed did not connect them"]
    connected = state((1, "trains"), *group(4, 1))  # one that begins alone, and joins later
    assert findings.at_end([connected, alone]) == []
    again = [(1, "trains"), *group(4, 1), (1, "joins", 0, 1), (1, "has joined", 0, 1)]
    assert findings.at_end([state(*again), state(*again)]) == []
    # torch.distributed is connected, but the Accelerator is not.
    for number, expected in (("1", [f"{line}Accelerator() counted 1 process in each"]), ("4", [])):
        made = '{"pid": %d, "event": "makes an Accelerator", "is_plain": true, "num_processes": %s}'
        lines = [made % (pid, number) for pid in (0, 1)]
        events = [*log(*group(4, 0, 1), (0, "trains"), (1, "trains")), *lines]
        assert findings.at_end([NodeState(read_members(events, []))] * 2) == expected


def test_silence_is_described_by_what_was_seen():
    first, second = state((5, "joins", 0, 2), running=True), state((6, "joins", 0, 2), running=True)
    assert findings.while_silent([first, second], 60.4) == (
        "no node has printed a line for 60 s; waiting in init_process_group: rank 0 of 2 on node 0,"
        " rank 0 of 2 on node 1; more than one process is rank 0; no process was seen waiting as "
        "rank 1"
    )
    waits = [state((5, "joins", 0, 4), (6, "joins", 1, 4), running=True), state()]
    assert findings.waiting(waits) == (
        "waiting in init_process_group: ranks 0, 1 of 4 on node 0; no process was seen waiting as "
        "ranks 2, 3"
    )
    trains = state(*group(4, 0, 1), (0, "trains"), running=True, bytes_sent=2048)
    assert findings.while_silent([trains, trains], 60) == (
        "no node has printed a line for 60 s; connected: 2 processes on node 0, 2 on node 1; "
        "have trained: 1 process on node 0, 1 on node 1; "
        "sent to other nodes so far: 2 KiB by node 0, 2 KiB by node 1"
    )
    unknown = [NodeState(processes=1), NodeState(processes=3)]
    assert findings.while_silent(unknown, 60) == (
        "no node has printed a line for 60 s; running: 1 process on node 0, 3 on node 1"
    )


def test_a_process_that_has_exited_or_failed_does_not_wait():
    exited = state((5, "joins", 0, 2))
    failed = state((5, "joins", 0, 2), (5, "fails to join"), running=True)
    for each in (exited, failed, state((5, "joins"), running=True)):  # the last has an unknown rank
        assert findings.waiting([each]) == ""


# --- the agent

SCRIPT = """
import sys, torch, torch.distributed as dist
from accelerate import Accelerator
for place in ({"rank": 7, "world_size": 9}, {"rank": 7}):
    try: dist.init_process_group("gloo", init_method="no-such://", **place)
    except Exception as error: print(type(error).__name__)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
Accelerator()
assert dist.is_initialized() and sys.argv[1] not in sys.path
"""


def test_the_agent_records_groups_accelerators_and_training(tmp_path):
    """It changes neither the results of the functions nor their errors, and hides no module."""
    (tmp_path / "sitecustomize.py").write_text("print('the sitecustomize of the user')")
    path = tmp_path / "log"
    path.touch()
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    changes = {LOG: str(path), "PYTHONPATH": f"{AGENT}{os.pathsep}{tmp_path}", "MASTER_PORT": "0"}
    environment = os.environ | place | changes | {"ACCELERATE_USE_CPU": "true"}
    words = [sys.executable, "-c", SCRIPT, str(AGENT)]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    printed = ended.stdout.splitlines()
    assert printed == ["the sitecustomize of the user", "RuntimeError", "RuntimeError"]
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({event.pop("pid") for event in events}) == 1
    assert events == [
        {"event": "joins", "rank": 7, "world_size": 9},
        {"event": "fails to join"},
        {"event": "joins"},
        {"event": "fails to join"},
        {"event": "trains"},
        {"event": "joins", "rank": 0, "world_size": 1},
        {"event": "has joined", "rank": 0, "world_size": 1},
        {"event": "makes an Accelerator", "is_plain": True, "num_processes": 1},
    ]


# --- launches


def findings_in(ended) -> list[str]:
    """Return what `nodes` has printed about the launch, without the events of a node."""
    return re.findall(r"^--- (?!node)(.*)$", ended.stdout, re.MULTILINE)


@both_networks
def test_commands_that_connect_nothing_get_no_line(network, start, tmp_path):
    for words in (["hostname"], ["sh", "-c", "echo 1 > {node}.txt"]):
        ended = start(["accel-demo", "nodes", "--network", network, "--", *words], cwd=tmp_path)
        assert (ended.returncode, findings_in(ended)) == (0, [])
    assert (tmp_path / "0.txt").exists() and (tmp_path / "1.txt").exists()


@both_networks
def test_a_silent_command_gets_a_line_after_each_doubled_time(network, start):
    options = ["--network", network, "--silence", "1", "--", "sleep", "4"]
    ended = start(["accel-demo", "nodes", *options])
    expected = "no node has printed a line for {} s; running: 1 process on node 0, 1 on node 1"
    if network == "namespaces":
        expected += "; sent to other nodes so far: 0 B by node 0, 0 B by node 1"
    seconds = []
    for line in findings_in(ended):
        [number] = re.findall(r"for (\d+) s", line)
        assert line == expected.format(number)
        seconds.append(int(number))
    assert ended.returncode == 0 and 1 <= seconds[0] <= seconds[1] / 2 and len(seconds) < 4


@pytest.mark.parametrize("silence", ["0", "-1", "nan", "1e9"])
def test_an_invalid_silence_is_refused(silence):
    message = f"--silence must be from 1 to 86400 seconds, got {float(silence):g}"
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        command.read([f"--silence={silence}", "--", "true"])


def test_on_loopback_a_port_in_use_is_explained_if_a_node_fails(start, tmp_path):
    """A program that finds another port itself does not fail."""
    (tmp_path / "x.py").write_text(
        "import os, socket, sys, time\n"
        "first = socket.create_server(('127.0.0.1', 0))\n"
        "try: socket.create_server(first.getsockname())\n"
        "except OSError as error: print(error)\n"
        "sys.exit(int(sys.argv[1]))\n"
    )
    for code, expected in ((0, []), (1, [command.SHARED_PORTS])):
        words = ["--processes-per-node", 1, "--", "python", "x.py", code]
        ended = start(["accel-demo", "nodes", "--network", "loopback", *words], cwd=tmp_path)
        lines = findings_in(ended)
        assert (ended.returncode, lines) == (code, expected)
        assert "Address already in use" in ended.stdout


@pytest.mark.slow
@both_networks
def test_two_worlds_are_reported(network, start):
    words = ["--processes-per-node", 1, "--", "python", FIELD / "nodes_two_worlds.py"]
    ended = start(["accel-demo", "nodes", "--network", network, *words])
    lines = findings_in(ended)
    if network == "namespaces":
        assert ended.returncode == 0 and ended.stdout.count("of 2\n") == 4
        assert lines == [
            "separate process groups: 2 processes on node 0, 2 on node 1; none had processes of two"
            " nodes, and the nodes sent each other 0 bytes"
        ]
    elif ended.returncode == 0:  # one node had finished before the other one began
        assert [line.split(":")[0] for line in lines] == ["separate process groups"]
    else:
        assert lines == [command.SHARED_PORTS]


@pytest.mark.slow
@both_networks
def test_a_rank_that_is_used_twice_is_reported(network, monkeypatch, capfd):
    monkeypatch.setattr(supervisor, "FAILURE_TIMEOUT", 1)
    options = f"--network {network} --processes-per-node 1 --silence 20 --kill-after 25"
    script = str(FIELD / "nodes_local_rank_as_rank.py")
    assert command.main([*options.split(), "--", "torchrun", script]) == 1
    assert (
        "waiting in init_process_group: rank 0 of 2 on node 0, rank 0 of 2 on node 1; more than one"
        " process is rank 0; no process was seen waiting as rank 1"
    ) in capfd.readouterr().out


@pytest.mark.slow
@both_networks
def test_processes_of_accelerate_are_connected_and_the_reader_is_warned(network, start):
    words = ["accelerate", "launch", FIELD / "nodes_plain_accelerator.py"]
    ended = start(["accel-demo", "nodes", "--network", network, "--", *words])
    assert ended.returncode == 0, ended.stderr
    for rank in range(4):
        assert f"process {rank} of 4, main={rank == 0}, 2 batches" in ended.stdout
    expected = [] if command.has_gpu() else [command.CLONES_WITHOUT_GPUS]
    assert findings_in(ended) == expected


@pytest.mark.slow
@both_networks
def test_clones_are_reported(network, start, tmp_path):
    """With this config, `accelerate launch` overrides ACCELERATE_USE_CPU."""
    (tmp_path / "x.yaml").write_text("distributed_type: NO\n")
    words = ["accelerate", "launch", "--config_file", tmp_path / "x.yaml"]
    words += [FIELD / "nodes_plain_accelerator.py"]
    ended = start(["accel-demo", "nodes", "--network", network, "--", *words])
    assert ended.stdout.count("process 0 of 1") == 2, ended.stderr
    alone = (
        "trained alone: 1 process on node 0, 1 on node 1; Accelerator() counted 1 process in each"
    )
    assert findings_in(ended) == [alone]
