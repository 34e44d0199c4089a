"""Test the cables of `accel-demo nodes`: --delay, alone and together with --rate."""

import errno
import re
import subprocess
from types import SimpleNamespace

import pytest

from accel_demo.errors import UserError
from accel_demo.lab import cables
from tests.lab.test_nodes import IN_NAMESPACES, in_namespaces, nothing_is_left

# Node 1 sends a byte to node 0, which returns it. Print the shortest of ten round trips.
ECHO = """
import os, socket, time
if os.environ["RANK"] == "0":
    connection, _ = socket.create_server(("10.77.0.1", 5000)).accept()
    while data := connection.recv(1):
        connection.send(data)
else:
    while True:
        try:
            connection = socket.create_connection(("10.77.0.1", 5000), 5)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    trips = []
    for _ in range(10):
        started = time.perf_counter()
        connection.send(b"x")
        connection.recv(1)
        trips.append(time.perf_counter() - started)
    print("round trip", min(trips))
"""


VALUES = {  # valid and invalid ones
    "--delay": (
        ("100us", "0.1ms", "0.0001s", "5ms", "1000ms", "1s"),
        ("", "5", "ms", "99us", "1.1s", "5 ms", "1e2ms", "-5ms", "٥ms", "5min"),
    ),
    "--rate": (
        ("100kbit", "1.5mbit", "100gbit"),
        ("", "mbit", "10MB", "10mbps", "1e3mbit", "101gbit"),
    ),
}
EXAMPLES = {
    "--delay": "like 5ms, from 100us to 1s",
    "--rate": "like 100mbit, from 100kbit to 100gbit",
}


@pytest.mark.parametrize("flag", VALUES)
def test_rates_and_delays_are_checked_in_all_units(flag):
    valid, invalid = VALUES[flag]
    for value in valid:
        cables.check(flag, value)
    for value in invalid:
        with pytest.raises(UserError) as error:
            cables.check(flag, value)
        assert str(error.value) == f"{flag} must be {EXAMPLES[flag]}, got {value}"


@pytest.mark.parametrize("rate", ["100mbit", None])
@pytest.mark.parametrize("delay", ["5ms", None])
def test_the_node_limits_what_it_sends_and_the_switch_delays_what_the_node_receives(
    rate, delay, monkeypatch
):
    lines = []
    monkeypatch.setattr(cables, "run_in_namespace", lambda *line: lines.append(line))
    switch, node = 11, 22  # process IDs
    cables.Cables(2, rate, delay, switch).connect(1, node)
    limit = "tc qdisc add dev eth0 root tbf rate 100mbit burst 12500 limit 400kb"
    slow = "tc qdisc add dev port1 root netem delay 5ms limit 100000"
    expected = [(node, limit)] if rate else []
    expected += [(switch, slow)] if delay else []
    assert [line for line in lines if line[1].startswith("tc")] == expected
    assert len(lines) == 5 + len(expected)


@pytest.mark.parametrize(
    ("rate", "size"), [("1mbit", 3000), ("25mbit", 3125), ("100mbit", 12_500), ("1gbit", 32_000)]
)
def test_few_bytes_pass_at_once(rate, size):
    assert cables.burst(rate) == size


def test_a_tool_that_hangs_gets_one_line(monkeypatch):
    still_running = SimpleNamespace(returncode=None)  # what `run_to_end` returns after a timeout
    monkeypatch.setattr(cables, "run_to_end", lambda *arguments, **options: still_running)
    with pytest.raises(UserError) as error:
        cables.run_in_namespace(1, "ip link")
    assert str(error.value) == "`ip link` did not finish within 30 s. Try again later."


def test_a_folder_for_temporary_files_that_cannot_be_written_gets_one_line(monkeypatch):
    def refuse(mode, encoding):
        raise OSError(errno.ENOENT, "No usable temporary directory found in ['/x']")

    monkeypatch.setattr(cables.tempfile, "NamedTemporaryFile", refuse)
    with pytest.raises(UserError) as error, cables.hosts_file(cables.Loopback()):
        pass
    reason = "No usable temporary directory found in ['/x']"
    assert str(error.value) == f"cannot write a temporary file ({reason}). Set TMPDIR."


def kernel_has_netem() -> bool:
    words = "unshare --net tc qdisc add dev lo root netem delay 1ms"
    return subprocess.run(words.split(), capture_output=True).returncode == 0


@pytest.mark.system
@in_namespaces
def test_a_round_trip_takes_twice_the_delay_or_the_kernel_lacks_netem(start):
    options = ["--processes-per-node", 1, "--delay", "20ms", "--rate", "50mbit"]
    with nothing_is_left():
        ended = start([*IN_NAMESPACES, *options, "--", "python", "-c", ECHO])
    if kernel_has_netem():
        trips = re.findall(r"^node 1 \| round trip (\S+)", ended.stdout, re.MULTILINE)
        assert ended.returncode == 0 and len(trips) == 1, ended.stdout + ended.stderr
        assert 0.04 <= float(trips[0]) < 0.08
    else:
        assert (ended.returncode, ended.stdout) == (2, "")
        assert re.fullmatch(
            r"error: --delay: this kernel cannot delay packets, because `tc … netem` failed "
            r"\(.+\)\. Leave --delay out, or use a kernel with the module sch_netem\.\n",
            ended.stderr,
        )
