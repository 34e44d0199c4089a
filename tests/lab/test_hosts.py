"""Test that --rate puts each process on its own host, and that the link's rate shows."""

import json
import signal
import subprocess
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from accel_demo.config import TrainConfig
from accel_demo.errors import UserError
from accel_demo.lab import cables, hosts
from accel_demo.lab.scaling import command as scaling
from accel_demo.lab.scaling import tables
from accel_demo.lab.timeline import command as timeline
from accel_demo.processes.group import results_by_rank
from tests.conftest import (
    left_behind,
    processes_below_this_one,
    run_to_end,
    start_process,
    text_of,
)
from tests.lab.test_nodes import namespace_of, path_with
from tests.lab.test_scaling import made_up

COMMANDS = {"timeline": timeline, "scaling": scaling}
OWN_NETWORK = hosts.own_network()


@pytest.fixture(scope="module")
def can_limit():
    """Skip the test if this machine cannot limit the rate between network namespaces."""
    try:
        with hosts.limited_hosts(2, "50mbit"):
            pass
    except UserError as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("name", COMMANDS)
def test_an_invalid_rate_is_an_error_before_anything_starts(name, monkeypatch):
    monkeypatch.setattr(cables, "open_cables", None)
    monkeypatch.setattr(f"accel_demo.lab.{name}.measurement.measure", None)
    for flags, message in (
        ("--rate fast", "--rate must be like 100mbit, from 100kbit to 100gbit, got fast"),
        ("--rate 1kbit", "--rate must be like 100mbit, from 100kbit to 100gbit, got 1kbit"),
        ("--rate 50mbit --processes 1", "--rate needs at least 2 processes"),
        ("--rate 100kbit --model vgg11", "at 100 kbit/s, each all-reduce would take"),
        ("--rate", "argument --rate: expected one argument"),
    ):
        with pytest.raises(UserError) as error:
            COMMANDS[name].main(flags.split())
        assert message in str(error.value) and "\n" not in str(error.value)


def test_a_rate_for_too_many_processes_is_an_error_and_none_creates_no_host():
    with hosts.limited_hosts(2, None) as own_hosts:
        assert own_hosts is None
    config = TrainConfig(model="small_cnn")
    hosts.check_rate("1gbit", hosts.MOST_HOSTS, config)
    with pytest.raises(UserError, match="at most 100 processes, got 101"):
        hosts.check_rate("1gbit", hosts.MOST_HOSTS + 1, config)


@pytest.mark.parametrize(
    ("system", "user", "path", "reason"),
    [
        ("darwin", 0, None, "network namespaces exist only on Linux"),
        ("linux", 1000, None, "network namespaces need root (sudo)"),
        ("linux", 0, "", "the program ip is missing (on Debian: apt-get install iproute2)"),
    ],
)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_rate_on_an_unsuitable_machine_is_an_error(
    name, system, user, path, reason, monkeypatch, tmp_path
):
    monkeypatch.setattr(cables.sys, "platform", system)
    monkeypatch.setattr(cables.os, "geteuid", lambda: user)
    if path is not None:
        monkeypatch.setenv("PATH", path)
    handler = signal.getsignal(signal.SIGTERM)
    before = processes_below_this_one()
    flags = ["--quick", "--rate", "50mbit"]
    flags += ["--output", str(tmp_path / "out")] if name == "timeline" else []
    with pytest.raises(UserError) as error:
        COMMANDS[name].main(flags)
    assert str(error.value) == f"--rate does not work here: {reason}"
    assert signal.getsignal(signal.SIGTERM) == handler
    assert processes_below_this_one() == before
    assert not (tmp_path / "out").exists()


def test_the_sending_time_is_the_bytes_of_a_ring_over_the_rate():
    assert hosts.sending_seconds(12_500_000, 2, "100mbit") == pytest.approx(1)
    assert hosts.sending_seconds(12_500_000, 4, "0.1gbit") == pytest.approx(1.5)
    assert hosts.sending_seconds(12_500_000, 2, "800kbit") == pytest.approx(125)
    rates = ("500kbit", "100mbit", "2.5gbit")
    assert [hosts.rate_text(rate) for rate in rates] == ["500 kbit/s", "100 Mbit/s", "2.5 Gbit/s"]


def test_processes_on_the_wrong_host_are_an_error():
    own_hosts = hosts.Hosts("10.77.0.1", "eth0", [1, 2], ["net:[1]", "net:[2]"])
    own_hosts.check(["net:[1]"])
    own_hosts.check(["net:[1]", "net:[2]"])
    for wrong in (["net:[2]", "net:[1]"], ["net:[1]", "net:[1]"], ["net:[1]", ""], [OWN_NETWORK]):
        with pytest.raises(RuntimeError, match="instead of"):
            own_hosts.check(wrong)
    with pytest.raises(RuntimeError, match="instead of"):  # both hosts have the same network
        replace(own_hosts, networks=["net:[1]"] * 2).check(["net:[1]"] * 2)


def test_the_tables_of_scaling_name_the_rate_and_the_sending_time(tmp_path):
    result = replace(made_up(0.5, [1, 2, 4], cores=4), rate="100mbit", gradient_bytes=12_500_000)
    text = tables.text(result)
    assert "1, 2, 4 connected processes, each sending at most 100 Mbit/s; medians" in text
    for sentence in (
        "with 2 processes, each of them sends 11.9 MiB in each step, which takes about 1 s at",
        "with 4 processes, each of them sends 17.9 MiB in each step, which takes about 1.5 s at",
    ):
        assert sentence in text
    tables.draw(result, tmp_path / "drawn.svg")
    assert "<!-- each process sends at most 100 Mbit/s -->" in (tmp_path / "drawn.svg").read_text()
    assert "Mbit" not in tables.text(replace(result, rate=None))


def timed_all_reduces(device: torch.device, size: int, repeats: int):
    """Return the rank, the world size, the network, the bytes sent, and the time of each repeat."""
    values, seconds = torch.ones(size // 4), []
    sent = bytes_sent_on("eth0")
    for _ in range(repeats):
        dist.barrier()
        started_at = time.perf_counter()
        dist.all_reduce(values)
        seconds.append(time.perf_counter() - started_at)
    dist.barrier()
    sent = bytes_sent_on("eth0") - sent
    assert values[0] == dist.get_world_size() ** repeats
    return dist.get_rank(), dist.get_world_size(), hosts.own_network(), sent, seconds


def bytes_sent_on(interface: str) -> int:
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    [counters] = [line.split() for line in lines if line.split()[0] == f"{interface}:"]
    return int(counters[9])  # source: the column headings of this file


@pytest.mark.system
@pytest.mark.parametrize(
    ("tool", "said", "message"),
    [
        ("tc", "Error: Specified qdisc kind is unknown.", "this kernel cannot limit the rate"),
        ("ip", "RTNETLINK answers: Operation not supported", "cannot connect network namespaces"),
        ("unshare", "unshare: unshare failed: Operation not permitted", "does not allow network"),
        ("mount", "mount: permission denied", "could not be prepared"),
    ],
)
def test_a_tool_that_fails_is_an_error_and_nothing_is_left(
    can_limit, tool, said, message, tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", path_with(tmp_path, tool, f"echo '{said}' >&2; exit 2"))
    before = processes_below_this_one()
    with pytest.raises(UserError) as error:
        timeline.main(["--quick", "--rate", "50mbit", "--output", str(tmp_path / "out")])
    assert message in str(error.value) and said in str(error.value)
    assert "\n" not in str(error.value)
    assert left_behind(before) == []


@pytest.mark.system
@pytest.mark.parametrize(("processes", "rate"), [(2, "50mbit"), (3, "100mbit")])
def test_an_all_reduce_takes_the_bytes_of_a_ring_over_the_rate(can_limit, processes, rate):
    size, repeats = 4_000_000, 4
    with hosts.limited_hosts(processes, rate) as own_hosts:
        assert own_hosts
        by_rank = results_by_rank(
            timed_all_reduces, processes, size, repeats, prepare=own_hosts.enter
        )
    ranks, world_sizes, own_networks, sent, seconds = zip(*by_rank, strict=True)
    assert ranks == tuple(range(processes)) and set(world_sizes) == {processes}
    own_hosts.check(list(own_networks))
    assert OWN_NETWORK not in own_networks and len(set(own_networks)) == processes
    expected = 2 * (processes - 1) / processes * size
    for of_rank in sent:  # the rest are headers and acknowledgements
        assert repeats * expected < of_rank < 1.15 * repeats * expected
    # Other programs can only make an all-reduce slower, so compare the fastest.
    fastest = min(map(max, zip(*seconds, strict=True)))
    megabits = int(rate.removesuffix("mbit"))
    assert fastest == pytest.approx(expected * 8 / (megabits * 1e6), rel=0.25)


@pytest.mark.system
def test_the_exposed_communication_of_the_timeline_grows_with_a_rate(can_limit, tmp_path):
    exposed = {}
    for rate in ("20mbit", None):
        flags = ["--rate", rate] if rate else []
        folder = tmp_path / str(rate)
        folder.mkdir()
        result = run_to_end(
            ["accel-demo", "timeline", "--quick", *flags]
            + ["--output", folder, "--json", folder / "x.json", "--plot", folder / "x.svg"],
            timeout=300,
        )
        assert result.returncode == 0, result.stderr
        numbers = json.loads((folder / "x.json").read_text())
        assert (numbers["processes"], numbers["backend"]) == (2, "gloo")
        assert numbers["settings"]["rate"] == rate
        shown = [result.stdout, (folder / "timeline.html").read_text()]
        for text in (*shown, (folder / "x.svg").read_text().replace("\n", " ")):
            assert ("at most 20 Mbit/s" in text) == bool(rate)
        assert ("which takes about 174 ms at 20 Mbit/s" in result.stdout) == bool(rate)
        exposed[rate] = [rank["exposed_ms"] for rank in numbers["ranks"]]
    seconds = hosts.sending_seconds(sum(map(sum, numbers["bucket_bytes"])), 2, "20mbit")
    assert seconds == pytest.approx(0.174, abs=0.001)
    assert min(exposed["20mbit"]) > 0.7 * 1000 * seconds
    assert max(exposed[None]) < 0.5 * min(exposed["20mbit"])


@pytest.mark.system
def test_with_a_rate_scaling_is_limited_by_the_link(can_limit, tmp_path):
    flags = ["--quick", "--model", "tiny_cnn", "--rate", "1mbit", "--json", tmp_path / "x.json"]
    result = run_to_end(["accel-demo", "scaling", *flags], timeout=300)
    assert result.returncode == 0, result.stderr
    numbers = json.loads((tmp_path / "x.json").read_text())
    assert (numbers["processes"], numbers["device"], numbers["rate"]) == ([1, 2], "cpu", "1mbit")
    assert "1, 2 connected processes, each sending at most 1 Mbit/s; medians" in result.stdout
    link_seconds = numbers["gradient_bytes"] * 8 / 1e6
    pairs = [row for row in numbers["rows"] if row["processes"] == 2]
    assert len(pairs) == 4
    for row in pairs:
        images = 2 * row["batch_size"]
        assert images / max(row["images_per_second"]) > 0.5 * link_seconds
        assert row["median_speedup"] < 0.5


@pytest.mark.system
@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("timeline", signal.SIGKILL),
        ("timeline", signal.SIGINT),
        ("scaling", signal.SIGKILL),
        ("scaling", signal.SIGTERM),
    ],
)
def test_nothing_is_left_of_a_stopped_command(can_limit, name, number, tmp_path):
    before, interfaces = processes_below_this_one(), interfaces_here()
    flags = ["--rate", "2mbit", "--model", "small_cnn"]  # 1.7 s per step
    flags += ["--output", tmp_path / "out"] if name == "timeline" else []
    with (
        (tmp_path / "stdout").open("w+") as stdout,
        (tmp_path / "stderr").open("w+") as stderr,
        ExitStack() as stack,
    ):
        command = start_process(["accel-demo", name, *flags], stdout, stderr, real=True)
        used = networks_with_ranks(before, processes=2)
        for pid in used.values():
            # Keep the namespace. Otherwise, another program's next namespace gets the same name.
            stack.enter_context(open(f"/proc/{pid}/ns/net"))
        command.send_signal(number)
        code = command.wait(timeout=30)
        if number == signal.SIGKILL:
            # The ranks die with the process that has started them. Python's fork server takes
            # seconds to exit, because it has imported torch.
            psutil.wait_procs(processes_below_this_one() - before, timeout=20)
        on_hosts = [pid for pid in psutil.pids() if namespace_of(pid) in used]
        assert left_behind(before) == []
        assert on_hosts == []
        printed = text_of(stdout) + text_of(stderr)
    expected = {"timeline": {signal.SIGKILL: -9, signal.SIGINT: 130}}
    expected["scaling"] = {signal.SIGKILL: -9, signal.SIGTERM: 130}
    assert code == expected[name][number], printed
    assert "Traceback" not in printed
    assert interfaces_here() == interfaces
    assert not (tmp_path / "out").exists()


def networks_with_ranks(before: set[psutil.Process], processes: int) -> dict[str, int]:
    """Wait until this many hosts have a rank.

    Return the network namespaces of all new processes, each with the ID of a process in it.
    """
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        names: dict[str, list[str]] = {}
        pids: dict[str, int] = {}
        for process in processes_below_this_one() - before:
            with suppress(psutil.Error):
                network = namespace_of(process.pid)
                names.setdefault(network, []).append(Path([*process.cmdline(), ""][0]).name)
                pids[network] = process.pid
        names = {network: names[network] for network in names.keys() - {OWN_NETWORK, ""}}
        # A host has its keeper, `cat`, and a rank. The keeper of the switch is a child of unshare.
        ranks = [of_host for of_host in names.values() if "python" in " ".join(of_host)]
        if [len(of_host) for of_host in ranks] == [2] * processes:
            assert len(names) == processes + 1
            time.sleep(2)  # the ranks connect and train
            return {network: pids[network] for network in names}
        time.sleep(0.05)
    raise AssertionError(f"there are not {processes} hosts with a rank, but {names}")


def interfaces_here() -> str:
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
