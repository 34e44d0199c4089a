"""Test how messages name the machines of lost processes."""

import os
import socket
import subprocess
import sys

import psutil
import pytest

from accel_demo.processes import lost_processes, peers
from accel_demo.processes.group import TIME_LIMIT
from accel_demo.processes.peers import (
    Peer,
    exchange_process_ids,
    name_of,
    own_host,
    own_machine,
    peer_of,
    store_host,
)


def known_peers() -> list[tuple[str, int]]:
    """Return (host, process ID) of each rank, as this process knows them."""
    exchange_process_ids()
    known = [peer_of(0), peer_of(1)]
    assert peer_of(2) is None
    return [(peer.host, peer.pid) for peer in known if peer]


def test_every_process_knows_all_hosts_and_process_ids(together):
    first, second = together(known_peers, 2)
    assert first == second
    assert [host for host, _ in first] == [own_host()] * 2
    pids = [pid for _, pid in first]
    assert len(set(pids)) == 2 and os.getpid() not in pids


@pytest.fixture
def four_peers(monkeypatch):
    """Two processes on each of two machines. The store is on the second one."""
    hosts = ("left", "left", "right", "right")
    known = [Peer(host, host, 100 + rank, host == "right") for rank, host in enumerate(hosts)]
    monkeypatch.setattr(peers, "_peers", known)


@pytest.mark.usefixtures("four_peers")
@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        ([1], "rank 1 on left"),
        ([2, 3], "ranks 2, 3 on right"),
        ([0, 2, 3], "rank 0 on left and ranks 2, 3 on right"),
    ],
)
def test_on_several_machines_messages_name_the_machine(ranks, name):
    assert name_of(ranks) == name and store_host() == "right"


def test_on_one_machine_messages_name_only_the_rank(monkeypatch):
    monkeypatch.setattr(peers, "_peers", [Peer("left", "left", pid, True) for pid in (1, 2)])
    assert (name_of([1]), name_of([0, 1])) == ("rank 1", "ranks 0, 1")


def test_a_process_on_a_copy_of_this_machine_is_not_looked_up_here(monkeypatch):
    """Copied virtual machines and containers may have the same host name."""
    process = subprocess.Popen(["true"])
    process.wait()
    known = [Peer(machine, own_host(), process.pid, True) for machine in (own_machine(), "copy")]
    monkeypatch.setattr(peers, "_peers", known)
    assert [lost_processes._has_died(rank) for rank in (0, 1)] == [True, False]
    assert [lost_processes._is_on_this_machine(rank) for rank in (0, 1)] == [True, False]


def test_the_line_that_failed_is_named_without_its_comment(tmp_path):
    file = tmp_path / "script.py"
    file.write_text('def main():\n    raise RuntimeError("gloo")  # why\n\n\nmain()\n')
    with pytest.raises(RuntimeError) as raised:
        exec(compile(file.read_text(), file, "exec"))
    assert lost_processes._failed_line(raised.value) == 'at `raise RuntimeError("gloo")`'


def options_of_the_connection_to_the_store() -> list[tuple[int, int]]:
    """Return (user timeout in ms, whether keepalive is on) of each connection to the store."""
    port, options = int(os.environ["MASTER_PORT"]), []
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr and connection.raddr.port == port:
            with socket.socket(fileno=os.dup(connection.fd)) as to_store:
                timeout = to_store.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                keepalive = to_store.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                options.append((timeout, keepalive))
    return options


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has TCP_USER_TIMEOUT")
def test_requests_to_an_unreachable_store_fail_as_soon_as_collectives_do(together):
    options = [(1000 * TIME_LIMIT, 1)]
    assert together(options_of_the_connection_to_the_store, 2) == [options, options]
