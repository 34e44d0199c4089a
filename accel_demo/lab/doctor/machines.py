"""Check a launch on several machines: compare the machines, launch the probe, compare its answers.

A doctor runs on each machine. The doctors meet before and after the launch, so that all of them
find the same problems, and print the same.
"""

import hashlib
import ipaddress
import os
import platform
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path

import psutil

import accel_demo
from accel_demo.errors import UserError
from accel_demo.lab.doctor.comparison import ROWS, fixes, obtained_cells, promised_cells
from accel_demo.lab.doctor.launch_config import ProbeAnswer, Promise, promise_of
from accel_demo.lab.doctor.launches import TIME_LIMIT, LaunchFailed, launch_probe
from accel_demo.lab.doctor.meeting import MeetingPoint, exchange
from accel_demo.processes.environment import number_in
from accel_demo.show import table

JOIN_TIMEOUT = 60  # seconds to wait for the other machines
MOST_CLOCK_DIFFERENCE = 5  # seconds
PORT = 29500  # the default of `accelerate launch`
PACKAGES = ("torch", "accelerate")
# What must be the same in the launch configs of all machines.
SETTINGS = ("distributed_type", "num_processes", "mixed_precision", "main_process_ip")


def overrides() -> dict:
    """Return the values that environment variables set, as `accel-demo nodes` does."""
    values: dict = {}
    if "NODE_RANK" in os.environ:
        values["machine_rank"] = number_in("NODE_RANK", 0)
    if "MASTER_ADDR" in os.environ:
        values["main_process_ip"] = os.environ["MASTER_ADDR"]
    if "MASTER_PORT" in os.environ:
        values["main_process_port"] = number_in("MASTER_PORT", PORT)
    if "NNODES" in os.environ and "NPROC_PER_NODE" in os.environ:
        values["num_machines"] = number_in("NNODES", 1)
        values["num_processes"] = number_in("NNODES", 1) * number_in("NPROC_PER_NODE", 1)
    return values


def check_launch(path: Path, config: dict, join_timeout: float, clock: Callable) -> int:
    """Launch the probe on all machines. Return 0 if everything is as promised, and 1 otherwise.

    Raises `UserError` if the machines cannot meet, or do not fit together.
    """
    promise = promise_of(config)
    rank, address = config.get("machine_rank", 0), config["main_process_ip"]
    port = config.get("main_process_port") or PORT
    point = MeetingPoint(address, port, promise.machines, join_timeout)
    say(f"waiting for {promise.machines} machines at {address}:{port} …")
    facts = exchange(facts_of_this_machine(config, promise), rank, point, clock)
    if problem := problem_in(facts, point):
        raise UserError(problem)
    rows = [[one["rank"], one["host"], one["address"], clock_words(one["clock"])] for one in facts]
    print(table(["machine", "host name", "address", "clock"], rows) + "\n", flush=True)

    say(f"launching a test program with {path} (about 10 seconds) …")
    report: dict = {"rank": rank, "answers": [], "failure": None}
    try:
        answers = launch_probe(path, flags=flags_for(config, promise, rank, port))
        report["answers"] = [asdict(answer) for answer in answers]
    except LaunchFailed as failure:
        report["failure"] = str(failure)
    reports = exchange(report, rank, replace(point, patience=TIME_LIMIT + 30, is_second=True))
    hosts = {one["rank"]: f"machine {one['rank']} ({one['host']})" for one in facts}
    if failures := failures_in(reports, hosts):
        print("\n".join(failures), file=sys.stderr)
        return 1
    every = {one["rank"]: [ProbeAnswer(**answer) for answer in one["answers"]] for one in reports}
    return compare(path, config, promise, every, rank, hosts)


def clock_words(seconds: float) -> str:
    return f"{round(seconds, 2) + 0:+.2f} s"  # + 0 turns -0.0 into 0.0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def flags_for(config: dict, promise: Promise, rank: int, port: int) -> tuple[str, ...]:
    """Return the flags that `accelerate launch` needs on this machine."""
    flags = f"--num_machines {promise.machines} --machine_rank {rank} "
    flags += f"--main_process_ip {config['main_process_ip']} --main_process_port {port} "
    return tuple((flags + f"--num_processes {promise.processes}").split())


def facts_of_this_machine(config: dict, promise: Promise) -> dict:
    """Return what the machines compare before a launch."""
    return {
        "rank": config.get("machine_rank", 0),
        "machines": promise.machines,
        "host": platform.node(),
        "versions": {"Python": platform.python_version()}
        | {name: metadata.version(name) for name in PACKAGES},
        "code": digest_of_code(Path(accel_demo.__file__).parent),
        "settings": {name: config.get(name) for name in SETTINGS}
        | {"the kind of distribution": promise.kind},
        "unreachable": unreachable_name(promise, config["main_process_ip"]),
    }


def digest_of_code(package: Path) -> str:
    """Return a digest of the package's Python files: their names and contents."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(package).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def unreachable_name(promise: Promise, main_process_ip: str) -> list[str] | None:
    """Return why other machines could not connect to this machine's processes, or None.

    Without GLOO_SOCKET_IFNAME, gloo tells the others to connect to the address that the host name
    stands for. Debian writes 127.0.1.1 into /etc/hosts, which is a different machine for each. The
    reason is a list: the host name, its address, and the name of the interface to use.
    """
    if promise.backend != "gloo" or "GLOO_SOCKET_IFNAME" in os.environ:
        return None
    try:
        address = socket.gethostbyname(socket.gethostname())
        if not is_loopback(address) or is_loopback(socket.gethostbyname(main_process_ip)):
            return None
    except OSError:
        return None
    return [socket.gethostname(), address, interface_towards(main_process_ip)]


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def interface_towards(address: str) -> str:
    """Return the network interface that reaches an address, or "eth0" if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing
        except OSError:
            return "eth0"
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == own for one in addresses) and not is_loopback(own):
            return name
    return "eth0"


def problem_in(facts: list[dict], point: MeetingPoint) -> str | None:
    """Return why the machines cannot launch together, in one line, or None if they can."""
    main, *others = facts
    name = {id(one): f"machine {one['rank']} ({one['host']})" for one in facts}
    for one in others:
        if one["machines"] != main["machines"]:
            return (
                f"num_machines is {one['machines']} on {name[id(one)]}, but {main['machines']} on "
                f"{name[id(main)]}. Use the same number everywhere."
            )
    last = point.machines - 1
    for one in facts:
        if not 0 <= one["rank"] <= last:
            return f"--machine-rank must be from 0 to {last}, got {one['rank']} on {one['host']}"
    ranks = [one["rank"] for one in facts]
    for rank in ranks:
        if ranks.count(rank) > 1:
            hosts = " and ".join(one["host"] for one in facts if one["rank"] == rank)
            return (
                f"{ranks.count(rank)} machines have the rank {rank} ({hosts}). Start each with its "
                f"own --machine-rank, from 0 to {last}."
            )
    for rank in range(point.machines):
        if rank not in ranks:
            return (
                f"machine {rank} has not joined within {point.patience:g} s. Type the same command "
                f"there, with --machine-rank {rank}."
            )
    return next(filter(None, (difference(main, one, name) for one in facts)), None)


def difference(main: dict, one: dict, name: dict[int, str]) -> str | None:
    """Return why a machine cannot launch together with machine 0, in one line, or None."""
    this, other = name[id(one)], name[id(main)]
    for package, version in one["versions"].items():
        if version != main["versions"][package]:
            return (
                f"{this} has {package} {version}, but {other} has {main['versions'][package]}. "
                "Install the same version on both."
            )
    if one["code"] != main["code"]:
        return (
            f"accel_demo has different code on {this} and {other}. Copy it from one to the other."
        )
    for setting, value in one["settings"].items():
        if value != main["settings"][setting]:
            return (
                f"{setting} is {value} on {this}, but {main['settings'][setting]} on {other}. Use "
                "the same launch config on both."
            )
    seconds = one["clock"] - main["clock"]
    if abs(seconds) > MOST_CLOCK_DIFFERENCE:
        direction = "ahead of" if seconds > 0 else "behind"
        return (
            f"the clock of {this} is {abs(seconds):,.0f} s {direction} that of {other}. "
            "Synchronize both, for example with chrony."
        )
    if one["unreachable"]:
        host, address, interface = one["unreachable"]
        return (
            f"the name {host} of machine {one['rank']} stands for {address}, which others cannot "
            f"reach. Set GLOO_SOCKET_IFNAME={interface} there."
        )
    return None


def failures_in(reports: list[dict], hosts: dict[int, str]) -> list[str]:
    """Return one line for each machine on which the launch has failed."""
    failures = {one["rank"]: one["failure"] for one in reports}
    missing = "its doctor has not reported back"
    return [
        f"the launch failed on {host}: {failures.get(rank, missing)}"
        for rank, host in hosts.items()
        if failures.get(rank, missing)
    ]


def compare(
    path: Path,
    config: dict,
    promise: Promise,
    every: dict[int, list[ProbeAnswer]],
    rank: int,
    hosts: dict[int, str],
) -> int:
    """Print what is promised for each machine and what each obtained. Return 0 if all is equal."""
    on_one = replace(promise, processes=promise.processes // promise.machines)
    promised = promised_cells(on_one, promise.processes)
    everyone = [answer for answers in every.values() for answer in answers]
    obtained = {number: obtained_cells(answers, everyone) for number, answers in every.items()}
    rows = list(zip(ROWS, promised, *obtained.values(), strict=True))
    columns = ["on each machine", "promised", *(f"machine {number}" for number in obtained)]
    print(f"{path}\n\n{table(columns, rows)}\n")
    is_as_promised = True
    for number, cells in obtained.items():
        different = [
            name for name, cell, wanted in zip(ROWS, cells, promised, strict=True) if cell != wanted
        ]
        if different:
            is_as_promised = False
            print(f"Not as promised on {hosts[number]}: {', '.join(different)}")
        if number == rank:
            for _, lines in fixes(config, on_one, every[number], different):
                print("\n".join(f"  {line}" for line in lines))
    if is_as_promised:
        print("Everything is as promised.")
    return 0 if is_as_promised else 1
