"""Test `accel-demo doctor` on several machines: two doctors on loopback, or in network namespaces.

Every doctor of a launch must print the same line.
"""

import errno
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from accel_demo.errors import UserError
from accel_demo.lab.doctor import command, connections, meeting
from accel_demo.lab.doctor.connections import (
    open_port,
    problem_of_host_name,
    problem_of_interfaces,
    unreachable_among,
)
from accel_demo.lab.doctor.machines import (
    connection_problem_in,
    digest_of_code,
    failures_in,
    notes_on,
    problem_in,
    targets,
)
from accel_demo.lab.doctor.meeting import GREETING, MeetingPoint, join_meeting
from accel_demo.processes.launch import free_port
from tests.conftest import BIN, REPOSITORY, run_all
from tests.lab.test_nodes import in_namespaces

CONFIG = REPOSITORY / "accelerate_configs" / "multi_node_cpu.yaml"
# Print the exit code, because `run_all` stops all commands as soon as one fails.
DOCTOR = """
import sys
from accel_demo.lab.doctor import command
print("exit code", command.main(sys.argv[1:]))
"""


def doctor(rank: int, port: int, *flags, config: Path = CONFIG, address="127.0.0.1") -> list[str]:
    """Return the arguments of `accel-demo doctor` on one machine."""
    flags = ["--main-process-ip", address, "--main-process-port", port, *flags]
    flags = ["--config", config, "--machine-rank", rank, "--join-timeout", 20, *flags]
    return [str(flag) for flag in flags]


def errors_of(*calls: list[str], clocks=(time.time, time.time)) -> list[str]:
    """Run doctors at the same time, in threads. Return the error of each."""

    def error_of(arguments, clock):
        with pytest.raises(UserError) as error:
            command.main(arguments, clock)
        return str(error.value)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(error_of, calls, clocks[: len(calls)]))


@pytest.mark.parametrize(
    ("config", "code", "device", "text"),
    [
        (CONFIG, 0, ["cpu", "cpu", "cpu"], "Everything is as promised."),
        (  # this is what accelerate_configs/README.md says about multi_node.yaml without GPUs
            CONFIG.with_name("multi_node.yaml"),
            1,
            ["cuda, one each", "cpu", "cpu"],
            "Fix: use accelerate_configs/multi_node_cpu.yaml, or a machine",
        ),
    ],
)
def test_two_doctors_print_what_both_machines_obtained(config, code, device, text):
    port = free_port()
    commands = [["python", "-c", DOCTOR, *doctor(rank, port, config=config)] for rank in (0, 1)]
    results = run_all(commands, timeout=100)
    for result in results:
        assert f"\nexit code {code}\n" in result.stdout, result
        cells = rows_of(result.stdout)
        assert cells["connected"] == ["all 4", "all 4", "all 4"]
        assert cells["processes"] == ["2", "2", "2"]
        assert cells["kind"] == ["DDP, whole model"] * 3
        assert cells["device"] == device
        assert cells["0"][0] == cells["1"][0] == socket.gethostname()
        assert text in result.stdout
        assert "  connected: no: 4 of 4 processes are clones that run alone\n" in result.stdout
    if code == 0:
        assert results[0].stdout == results[1].stdout


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_launch_on_one_node_uses_the_number_of_nodes_in_the_environment(processes, start):
    """`accel-demo nodes --nodes 1` sets these variables. The file has two machines."""
    variables = {"NNODES": "1", "NPROC_PER_NODE": processes, "MASTER_ADDR": "127.0.0.1"}
    words = ["accel-demo", "doctor", "--config", CONFIG]
    result = start(words, **variables, MASTER_PORT=str(free_port()), NODE_RANK="0")
    assert result.returncode == 0, result.stdout + result.stderr
    assert rows_of(result.stdout)["processes"] == [processes, processes]


def rows_of(stdout: str) -> dict[str, list[str]]:
    lines = [line for line in stdout.splitlines() if line.startswith("|")]
    return {
        cells[0].strip(): [cell.strip() for cell in cells[1:-1]]
        for _, *cells in (line.split("|") for line in lines)
    }


def edited(folder: Path, old: str, new: str) -> Path:
    text = CONFIG.read_text()
    assert old in text
    (folder / "edited.yaml").write_text(text.replace(old, new))
    return folder / "edited.yaml"


# For each mistake: the changed arguments of the second doctor, and the line that both print
MISTAKES = {
    "the same rank": ({"rank": 0}, "2 machines have rank 0 (HOST and HOST). Start each with its"),
    "a rank out of range": ({"rank": 2}, "--machine-rank must be from 0 to 1, got 2 on HOST"),
    "a clock an hour behind": (
        {},
        "the clock of machine 1 (HOST) is 3,600 s behind that of machine 0",
    ),
    "num_processes: 6": ({}, "num_processes is 6 on machine 1 (HOST), but 4 on machine 0 (HOST)."),
    "num_machines: 4": (
        {},
        "num_machines is 4 on machine 1 (HOST), but 2 on machine 0 (HOST).",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_both_doctors_print_the_same_line_about(mistake, tmp_path):
    changes, line = MISTAKES[mistake]
    port, clock = free_port(), time.time
    if mistake.startswith("num_"):
        key = mistake.split(":")[0]
        config = tmp_path / "edited.yaml"
        config.write_text(re.sub(rf"^{key}: \d", mistake, CONFIG.read_text(), flags=re.MULTILINE))
        changes = {"config": config}
    elif "clock" in mistake:
        clock = lambda: time.time() - 3600  # noqa: E731
    second = doctor(**{"rank": 1, "port": port, **changes})
    lines = errors_of(doctor(0, port), second, clocks=(time.time, clock))
    assert lines[0] == lines[1]
    assert lines[0].startswith(line.replace("HOST", socket.gethostname()))


def test_different_code_and_versions_are_errors(tmp_path):
    shutil.copytree(REPOSITORY / "accel_demo", tmp_path / "accel_demo")
    digests = [digest_of_code(folder / "accel_demo") for folder in (REPOSITORY, tmp_path)]
    assert digests[0] == digests[1]
    with (tmp_path / "accel_demo" / "metrics.py").open("a") as file:
        file.write("# changed\n")
    changed = digest_of_code(tmp_path / "accel_demo")
    one = facts_of(0, code=digests[0], versions={"accelerate": "1.15"})
    assert problem_in([one, facts_of(1, code=digests[0], versions=one["versions"])], POINT) is None
    # The code is compared first, because it decides which packages are compared.
    assert problem_in([one, facts_of(1, code=changed, versions={"numpy": "1"})], POINT) == (
        "accel_demo has different code on machine 1 (x) and machine 0 (x). Copy it from one to the "
        "other."
    )
    other = facts_of(1, code=digests[0], versions={"accelerate": "9.9"})
    assert problem_in([one, other], POINT) == (
        "machine 1 (x) has accelerate 9.9, but machine 0 (x) has 1.15. Install the same version on "
        "both."
    )


def test_a_machine_that_never_joins_is_an_error():
    [line] = errors_of(doctor(0, free_port(), "--join-timeout", 1))
    assert line.startswith(
        "machine 1 has not joined within 1 s. Run the same command there, with --machine-rank 1."
    )


def test_an_address_that_does_not_answer_is_an_error_in_one_line(start):
    port = free_port()
    result = start(["accel-demo", "doctor", *doctor(1, port, "--join-timeout", 1)])
    waiting, line = result.stderr.splitlines()
    assert (result.returncode, result.stdout) == (2, "") and waiting.startswith("waiting for")
    assert line.startswith(
        f"error: no doctor answers at 127.0.0.1:{port} within 1 s (connection refused). Start it on"
    )


def test_an_unknown_address_or_an_impossible_join_timeout_is_an_error():
    for address in ("node-0.invalid", "a" * 70, "a b"):
        with pytest.raises(UserError, match=f"main_process_ip {address} is not a known address"):
            meet(1, MeetingPoint(address, 29500, 2, timeout=5))
    for timeout in ("0", "-1", "nan", "1e9"):
        with pytest.raises(UserError, match="--join-timeout must be above 0 and at most 86400 s"):
            command.main(["--config", str(CONFIG), "--join-timeout", timeout])


def test_both_doctors_report_a_port_that_is_in_use():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        lines = errors_of(doctor(0, port), doctor(1, port))
    assert set(lines) == {
        f"127.0.0.1:{port} is used by a different program, or by a launch that is still running. "
        "Choose a main_process_port that is free, or start doctor again on all machines."
    }


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the address 127.0.0.2")
def test_machine_0_reports_a_port_that_is_in_use_only_at_a_different_address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} is in use on this machine. Choose a"):
            meet(0, MeetingPoint("127.0.0.2", port, 2, timeout=0.5))


def test_machine_0_reports_an_address_of_a_different_machine():
    port = free_port()
    message = f"192.0.2.1:{port} does not reach this machine .* Set main.* with `accel-demo nodes`"
    with pytest.raises(UserError, match=message):
        meet(0, MeetingPoint("192.0.2.1", port, 2, timeout=0.5))


def test_a_port_that_needs_root_is_an_error(monkeypatch):
    def refuse(*arguments, **options):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket, "create_server", refuse)
    message = "cannot use port 80: Permission denied. Choose a main_process_port of 1024 or higher."
    with pytest.raises(UserError, match=message):
        meet(0, MeetingPoint("127.0.0.1", 80, 2, timeout=1))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("SSH-2.0-OpenSSH_9.2p1", "is used by a different program, or by a launch"),
        (json.dumps(GREETING), "machine 0 has ended the meeting. Start doctor again on"),
    ],
)
def test_a_host_that_hangs_up_is_an_error(said, message):
    def speak():
        connection, _ = server.accept()
        with connection:
            connection.sendall(f"{said}\r\n".encode())

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=speak, daemon=True).start()
        point = MeetingPoint("127.0.0.1", server.getsockname()[1], 2, timeout=10)
        with pytest.raises(UserError, match=message):
            meet(1, point)


def test_ctrl_c_ends_the_meeting_at_once():
    words = [BIN / "accel-demo", "doctor", *doctor(0, free_port())]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert process.stderr.readline().startswith("waiting for 2 machines")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert (process.returncode, stderr) == (130, "stopped\n")


def meet(rank: int, point: MeetingPoint, clock=time.time) -> list[dict]:
    """Join a meeting, exchange the rank once, and return what all machines have sent."""
    with join_meeting(rank, point, clock) as guest:
        return guest.exchange({"rank": rank, "machines": point.machines}, point.timeout)


def test_three_machines_exchange_their_facts_and_measure_their_clocks():
    point = MeetingPoint("127.0.0.1", free_port(), 3, timeout=20)
    ahead = {0: 0.0, 1: 100.0, 2: -7.0}
    with ThreadPoolExecutor(3) as pool:
        meetings = [
            pool.submit(meet, n, point, lambda n=n: time.time() + ahead[n]) for n in (2, 0, 1)
        ]
    lists = [meeting.result() for meeting in meetings]
    assert lists[0] == lists[1] == lists[2]
    assert [one["rank"] for one in lists[0]] == [0, 1, 2]
    assert [one["clock"] for one in lists[0]] == pytest.approx([0, 100, -7], abs=0.5)
    free_port(point.port)  # raises an error if the port is still in use


def test_a_doctor_that_is_restarted_before_the_meeting_is_counted_once():
    point = MeetingPoint("127.0.0.1", free_port(), 3, timeout=20)
    with ThreadPoolExecutor(3) as pool:
        meetings = [pool.submit(meet, 0, point)]
        with join_meeting(1, point) as stopped:
            facts = {"rank": 1, "machines": 3, "clock": 0.0}
            meeting.send(stopped.connection, {"facts": facts, "timeout": 20})
            time.sleep(0.3)  # the host waits for the other machines
        time.sleep(0.3)  # the host notices that the doctor has ended
        meetings += [pool.submit(meet, n, point) for n in (1, 2)]
    for everyone in meetings:
        assert [one["rank"] for one in everyone.result()] == [0, 1, 2]


def test_a_doctor_that_is_restarted_during_the_launch_is_refused_and_missed():
    """Machine 0 keeps its connections, but no longer listens, so that the launch can."""
    point = MeetingPoint("127.0.0.1", free_port(), 2, timeout=20)
    with ThreadPoolExecutor(1) as pool, join_meeting(0, point) as guest:
        other = pool.submit(meet, 1, point)
        everyone = guest.exchange({"rank": 0, "machines": 2}, 20)
        assert everyone == other.result() and len(everyone) == 2
        with pytest.raises(UserError, match="no doctor answers at"):
            meet(1, replace(point, timeout=0.3))
        socket.create_server(("127.0.0.1", point.port)).close()
        started = time.monotonic()
        assert [one["rank"] for one in guest.exchange({"rank": 0}, 20)] == [0]
        assert time.monotonic() - started < 5


def test_a_machine_that_does_not_wait_as_long_as_machine_0_says_so(monkeypatch):
    point = MeetingPoint("127.0.0.1", free_port(), 3, timeout=20)
    with join_meeting(0, point), join_meeting(1, point) as guest:
        monkeypatch.setattr(meeting, "GREETING_TIMEOUT", 0.1)
        with pytest.raises(UserError, match="machine 0 has not answered within 0.1 s, perhaps"):
            guest.exchange({"rank": 1, "machines": 3}, 0.1)


def facts_of(rank: int, **changes) -> dict:
    facts = {"rank": rank, "machines": 2, "host": "x", "identity": f"{rank}", "clock": 0.0}
    facts |= {"versions": {}, "code": "", "settings": {}, "host_name_problem": None}
    facts |= {"interface_problem": None}
    return facts | {"address": f"10.77.0.{rank + 1}", "gloo_address": None} | changes


POINT = MeetingPoint("10.77.0.1", 29500, 2, timeout=1)
NAMES = {
    "localhost": (["127.0.0.1"], "resolves to 127.0.0.1, which others cannot reach"),
    "node-0": ([], "does not resolve to an address"),
    "node-1": (["192.0.2.1"], "resolves to 192.0.2.1, which is not an address of this machine"),
}


@pytest.mark.parametrize("host", NAMES)
def test_a_host_name_that_gives_gloo_no_useful_address_is_an_error(host, monkeypatch):
    addresses, reason = NAMES[host]
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    monkeypatch.setattr(connections, "addresses_of", lambda name: addresses)
    assert problem_of_host_name("10.77.0.1") is None  # tests set GLOO_SOCKET_IFNAME
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    problem = problem_of_host_name("10.77.0.1")
    assert problem and problem[:2] == [host, reason]
    facts = [facts_of(0), facts_of(1, host_name_problem=problem)]
    line = f"the name {host} of machine 1 {reason}. Set GLOO_SOCKET_IFNAME={problem[2]} there."
    assert problem_in(facts, POINT) == line
    on_one_computer = [one | {"identity": "same"} for one in facts]
    assert problem_in(on_one_computer, POINT) is None


def test_a_wrong_interface_in_the_environment_is_an_error_on_all_machines(monkeypatch):
    assert problem_of_interfaces() is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eht0")
    problem = problem_of_interfaces()
    assert problem and "is eht0, but this machine has no such network interface" in problem
    assert "It has lo" in problem
    line = f"on machine 1 (x), {problem}"
    assert problem_in([facts_of(0), facts_of(1, interface_problem=problem)], POINT) == line


def test_a_host_name_that_does_not_resolve_has_no_address():
    assert connections.addresses_of("no-such-name.invalid") == []
    assert connections.addresses_of("a" * 70) == []


def test_a_host_name_that_two_machines_share_is_a_note_and_no_error():
    facts = [facts_of(0), facts_of(1)]
    assert problem_in(facts, POINT) is None
    (note,) = notes_on(facts)
    assert note.startswith("Note: machine 0 and machine 1 have the same host name, x, so errors")
    assert notes_on([facts_of(0), facts_of(1, host="y")]) == []
    assert notes_on([facts_of(0), facts_of(1, identity="0")]) == []  # they are one computer


def test_a_port_that_a_firewall_closes_is_an_error():
    with open_port() as port:
        assert unreachable_among({1: ("127.0.0.1", port)}) is None
    unreachable = unreachable_among({1: ("127.0.0.1", port)})
    assert unreachable == [1, "127.0.0.1", port, "connection refused"]
    facts = [facts_of(0), facts_of(1)]
    attempts = [{"rank": 0, "unreachable": unreachable}, {"rank": 1, "unreachable": None}]
    assert connection_problem_in(attempts, facts) == (
        f"machine 0 (x) cannot connect to 127.0.0.1, port {port}, of machine 1 (x): connection "
        "refused. Open all ports between the machines in the firewall."
    )
    attempts[0]["unreachable"] = None
    assert connection_problem_in(attempts, facts) is None
    assert connection_problem_in(attempts[:1], facts) == (
        "the doctor on machine 1 (x) has ended. Start doctor again on all machines."
    )


def test_machines_try_the_addresses_that_their_processes_would_use():
    facts = [facts_of(rank, open_port=1000 + rank) for rank in (0, 1)]
    assert targets(facts, 0, "main") == {1: ("10.77.0.2", 1001)}
    assert targets(facts, 1, "main") == {0: ("main", 1000)}
    facts = [one | {"gloo_address": f"10.1.1.{one['rank']}"} for one in facts]
    assert targets(facts, 1, "main") == {0: ("10.1.1.0", 1000)}


def test_a_failed_launch_is_reported_with_its_machine():
    hosts = {0: "machine 0 (a)", 1: "machine 1 (b)", 2: "machine 2 (c)"}
    reports = [{"rank": 0, "failure": None}, {"rank": 1, "failure": "ValueError: x"}]
    assert failures_in(reports, hosts) == [
        "the launch failed on machine 1 (b): ValueError: x",
        "the launch failed on machine 2 (c): its doctor has ended, or cannot be reached",
    ]


ON_NODE = [BIN / "accel-demo", "doctor", "--config", CONFIG]


def doctor_in_namespaces(start, preparation: str = "") -> SimpleNamespace:
    """Run a doctor on each of two nodes. `preparation` is a shell script to run before."""
    words = ["sh", "-c", f"{preparation} exec {' '.join(map(str, ON_NODE))}"]
    return start(["accel-demo", "nodes", "--network", "namespaces", "--", *words], timeout=200)


@pytest.mark.slow
@pytest.mark.system
@in_namespaces
def test_doctors_in_two_network_namespaces_meet(start):
    result = doctor_in_namespaces(start)
    assert result.returncode == 0, result.stdout + result.stderr
    for node in (0, 1):
        own = [line for line in result.stdout.splitlines() if line.startswith(f"node {node} | |")]
        cells = rows_of("\n".join(line.removeprefix(f"node {node} | ") for line in own))
        assert cells["connected"] == ["all 4", "all 4", "all 4"]
        assert cells["0"][:2] == ["node-0", "10.77.0.1"]
        assert cells["1"][:2] == ["node-1", "10.77.0.2"]
    assert result.stdout.count("Everything is as promised.") == 2


@pytest.mark.system
@in_namespaces
def test_debians_entry_for_the_host_name_is_noticed(start):
    """Each node has an /etc/hosts of its own, so this changes nothing outside the nodes."""
    spoil = "echo 127.0.1.1 $(hostname) > /etc/hosts; unset GLOO_SOCKET_IFNAME;"
    result = doctor_in_namespaces(start, spoil)
    assert result.returncode == 1
    for node in (0, 1):
        expected = (
            f"node {node} | error: the name node-0 of machine 0 resolves to 127.0.1.1, which "
            "others cannot reach. Set GLOO_SOCKET_IFNAME=eth0 there."
        )
        assert result.stderr.splitlines().count(expected) == 1, result.stderr


@pytest.mark.system
@in_namespaces
def test_a_firewall_that_opens_only_the_main_port_is_noticed(start):
    """Node 1 can only send from or to the main port. Its own rules replace a firewall."""
    rules = "".join(
        f"ip rule add pref {number} ipproto tcp {selector}; "
        for number, selector in enumerate(
            ["dport $MASTER_PORT lookup main", "sport $MASTER_PORT lookup main", "unreachable"], 10
        )
    )
    result = doctor_in_namespaces(start, f"[ $NODE_RANK = 0 ] || {{ {rules} }};")
    assert result.returncode == 1
    expected = r"error: machine . \(node-.\) cannot connect to 10.77.0.., port \d+, of machine ."
    for node in (0, 1):
        lines = re.findall(rf"node {node} \| {expected}.*", result.stderr)
        assert len(lines) == 1 and "Open all ports between the machines" in lines[0], result.stderr
