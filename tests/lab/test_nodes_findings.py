"""Test what `accel-demo nodes` says about processes that are not connected, or that wait."""

import re
from pathlib import Path

import pytest

from accel_demo.errors import UserError
from accel_demo.lab import cables
from accel_demo.lab.nodes import command, findings, supervisor
from accel_demo.lab.nodes.members import NodeState, read_members

FIELD = Path(__file__).with_name("field")  # short scripts that people write, each with a fault
missing = cables.why_not()
namespaces = pytest.param(
    "namespaces",
    marks=[pytest.mark.system, pytest.mark.skipif(missing is not None, reason=str(missing))],
)
both_networks = pytest.mark.parametrize("network", ["loopback", namespaces])


def logs(*events: tuple) -> list[list[dict]]:
    """Return the events of each process, in order. An event is (pid, kind) or has more values."""
    names = ("pid", "kind", "rank", "world")
    found: dict[int, list[dict]] = {}
    for time, event in enumerate(events):
        each = dict(zip(names, (*event, None, None), strict=False)) | {"time": time}
        found.setdefault(event[0], []).append(each)
    return list(found.values())


def state(*events: tuple, running: bool = False, **others) -> NodeState:
    """Return the state of a node whose processes have recorded the events."""
    pids = [event[0] for event in events] if running else []
    return NodeState(read_members(logs(*events), pids), len(set(pids)), **others)


def group(size: int, *ranks: int) -> list[tuple]:
    """Return the events of processes that join a group, with their ranks as their IDs."""
    joins = [(rank, "connecting", rank, size) for rank in ranks]
    return joins + [(rank, "connected", rank, size) for rank in ranks]


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
    common = [(0, "connecting", 2, 4), (1, "connecting", 3, 4)]
    common += [(0, "connected", 2, 4), (1, "connected", 3, 4)]
    assert findings.at_end([state(*own, *group(4, 0, 1)), state(*own, *common)]) == []
    assert findings.at_end([state(*group(4, 0, 1), *own), state(*common, *own)]) == []


def test_processes_that_train_alone_are_clones():
    alone = state((1, "step"), (2, "step"))
    line = "trained alone: 2 processes on node 0, 2 on node 1; "
    assert findings.at_end([alone, alone]) == [f"{line}torch.distributed did not connect them"]
    assert findings.at_end([state((1, "step")), state()]) == []
    single = state((1, "step"), (1, "connecting", 0, 1), (1, "connected", 0, 1), (2, "step"))
    assert findings.at_end([single, single]) == [f"{line}torch.distributed did not connect them"]
    connected = state((1, "step"), *group(4, 1))  # one that begins alone, and joins later
    assert findings.at_end([connected, alone]) == []
    again = [(1, "step"), *group(4, 1), (1, "connecting", 0, 1), (1, "connected", 0, 1)]
    assert findings.at_end([state(*again), state(*again)]) == []
    # torch.distributed is connected, but the Accelerator is not.
    for number, expected in ((1, [f"{line}Accelerator() counted 1 process in each"]), (4, [])):
        made = {"kind": "accelerator", "time": 9, "is_plain": True, "processes": number}
        events = logs(*group(4, 0, 1), (0, "step"), (1, "step"))
        node = NodeState(read_members([[*log, made] for log in events], []))
        assert findings.at_end([node, node]) == expected


def test_silence_is_described_by_what_was_seen():
    both = [state((pid, "connecting", 0, 2), running=True) for pid in (5, 6)]
    assert findings.while_silent(both, 60.4) == (
        "no node has printed a line for 60 s; waiting in init_process_group: rank 0 of 2 on node 0,"
        " rank 0 of 2 on node 1; more than one process is rank 0; no process was seen waiting as "
        "rank 1"
    )
    waits = [state((5, "connecting", 0, 4), (6, "connecting", 1, 4), running=True), state()]
    assert findings.waiting(waits) == (
        "waiting in init_process_group: ranks 0, 1 of 4 on node 0; no process was seen waiting as "
        "ranks 2, 3"
    )
    trains = state(*group(4, 0, 1), (0, "step"), running=True, bytes_sent=2048)
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
    exited = state((5, "connecting", 0, 2))
    failed = state((5, "connecting", 0, 2), (5, "not connected"), running=True)
    unknown_rank = state((5, "connecting"), running=True)
    for each in (exited, failed, unknown_rank):
        assert findings.waiting([each]) == ""


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
    options = ["--network", network, "--silence", "1", "--", "sleep", "3.5"]
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
