"""Check a launch on several machines: compare the machines, launch the probe, compare its answers.

A doctor runs on each machine. The doctors exchange what they find before and after the launch, so
that all of them print the same. Only the advice on how to fix a launch that is not as promised is
different: each machine prints what concerns itself.
"""

import hashlib
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path

import accel_demo
from accel_demo.errors import UserError, say
from accel_demo.lab.doctor.comparison import (
    fixes,
    obtained_cells,
    plain_words,
    print_comparison,
    promised_cells,
)
from accel_demo.lab.doctor.connections import (
    gloo_address,
    open_port,
    problem_of_host_name,
    problem_of_interfaces,
    unreachable_among,
)
from accel_demo.lab.doctor.launch_config import ProbeAnswer, Promise, promise_of
from accel_demo.lab.doctor.launches import TIME_LIMIT, LaunchFailed, flags_for, launch_probe
from accel_demo.lab.doctor.meeting import MeetingPoint, join_meeting
from accel_demo.processes.environment import number_in
from accel_demo.show import table
from accel_demo.terminal import display

JOIN_TIMEOUT = 60  # seconds to wait for the other machines
ANSWER_TIMEOUT = 30  # seconds to wait for them again, while all of them do the same
MOST_CLOCK_DIFFERENCE = 5  # seconds
PORT = 29500  # the default of `accelerate launch`
PACKAGES = ("torch", "torchvision", "accelerate")
# What must be the same in the launch configs of all machines. A different main_process_ip is no
# problem: all machines have reached machine 0 with their own.
SETTINGS = ("distributed_type", "num_processes", "mixed_precision")


def overrides() -> dict:
    """Return the values that environment variables set, as `accel-demo nodes` does."""
    values: dict = {}
    if "MASTER_ADDR" in os.environ:
        values["main_process_ip"] = os.environ["MASTER_ADDR"]
    for name, variable in (("machine_rank", "NODE_RANK"), ("main_process_port", "MASTER_PORT")):
        if variable in os.environ:
            values[name] = number_in(variable, 0)
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
    with open_port() as own_port, join_meeting(rank, point, clock) as meeting:
        own_facts = facts_of_this_machine(config, promise, own_port)
        facts = meeting.exchange(own_facts, join_timeout)
        if problem := problem_in(facts, point):
            raise UserError(problem)
        rows = [
            [one["rank"], one["host"], one["address"], clock_words(one["clock"])] for one in facts
        ]
        display(table(["machine", "host name", "address", "clock"], rows) + "\n")
        for note in notes_on(facts):
            display(f"{note}\n")
        others = targets(facts, rank, address)
        attempt = {"rank": rank, "unreachable": unreachable_among(others)}
        attempts = meeting.exchange(attempt, ANSWER_TIMEOUT)
        if problem := connection_problem_in(attempts, facts):
            raise UserError(problem)

        say(f"launching a test program with {path} (about 20 seconds) …")
        names = {one["rank"]: name_of(one) for one in facts}
        reports = meeting.exchange(report_of(rank, path, config), TIME_LIMIT + ANSWER_TIMEOUT)
        if failures := failures_in(reports, names):
            say("\n".join(failures))
            return 1
        every, plain_reports = answers_in(reports), reports
        everyone = [answer for answers in every.values() for answer in answers]
        if not all(answer.is_plain for answer in everyone):
            report = report_of(rank, path, config, plain=True)
            plain_reports = meeting.exchange(report, TIME_LIMIT + ANSWER_TIMEOUT)
    code = compare(path, config, promise, every, rank, names)
    failures = failures_in(plain_reports, names)
    plain = [answer for answers in answers_in(plain_reports).values() for answer in answers]
    display("\n".join(plain_words(everyone, failures[0] if failures else plain)))
    return code


def report_of(rank: int, path: Path, config: dict, plain: bool = False) -> dict:
    """Launch the probe, and return the answers of this machine, or why the launch failed."""
    try:
        answers = launch_probe(path, flags=flags_for(config), plain=plain)
    except LaunchFailed as failure:
        return {"rank": rank, "answers": [], "failure": str(failure)}
    return {"rank": rank, "answers": [asdict(answer) for answer in answers], "failure": None}


def answers_in(reports: list[dict]) -> dict[int, list[ProbeAnswer]]:
    """Return the answers of the processes on each machine, by its rank."""
    return {one["rank"]: [ProbeAnswer(**answer) for answer in one["answers"]] for one in reports}


def name_of(facts: dict) -> str:
    return f"machine {facts['rank']} ({facts['host']})"


def clock_words(seconds: float) -> str:
    return f"{round(seconds, 2) + 0:+.2f} s"  # + 0 turns -0.0 into 0.0


def facts_of_this_machine(config: dict, promise: Promise, open_port: int) -> dict:
    """Return what the machines compare before a launch."""
    from accel_demo.processes.peers import own_machine

    uses_gloo = promise.backend == "gloo"
    return {
        "rank": config.get("machine_rank", 0),
        "machines": promise.machines,
        "host": platform.node(),
        "identity": own_machine(),
        "versions": {"Python": platform.python_version()}
        | {name: metadata.version(name) for name in PACKAGES},
        "code": digest_of_code(Path(accel_demo.__file__).parent),
        "settings": {name: config.get(name) for name in SETTINGS}
        | {"the kind of distribution": promise.kind},
        "host_name_problem": problem_of_host_name(config["main_process_ip"]) if uses_gloo else None,
        "interface_problem": problem_of_interfaces() if uses_gloo else None,
        "gloo_address": gloo_address() if uses_gloo else None,
        "open_port": open_port,
    }


def digest_of_code(package: Path) -> str:
    """Return a digest of the package's Python files: their names and contents."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(package).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def problem_in(facts: list[dict], point: MeetingPoint) -> str | None:
    """Return why the machines cannot launch together, in one line, or None if they can."""
    return next(_problems_in(facts, point), None)


def _problems_in(facts: list[dict], point: MeetingPoint) -> Iterator[str]:
    main, last = facts[0], point.machines - 1
    for one in facts:
        if one["machines"] != main["machines"]:
            yield (
                f"num_machines is {one['machines']} on {name_of(one)}, but {main['machines']} on "
                f"{name_of(main)}. Use the same number everywhere."
            )
    for one in facts:
        if not 0 <= one["rank"] <= last:
            yield f"--machine-rank must be from 0 to {last}, got {one['rank']} on {one['host']}"
    hosts: dict[int, list[str]] = {}
    for one in facts:
        hosts.setdefault(one["rank"], []).append(one["host"])
    for rank, names in hosts.items():
        if len(names) > 1:
            yield (
                f"{len(names)} machines have rank {rank} ({' and '.join(names)}). Start each with "
                f"its own --machine-rank, from 0 to {last}."
            )
    for rank in range(point.machines):
        if rank not in hosts:
            yield (
                f"machine {rank} has not joined within {point.timeout:g} s. Run the same command "
                f"there, with --machine-rank {rank}."
            )
    for one in facts:
        yield from _differences(main, one)
        if one["interface_problem"]:
            yield f"on {name_of(one)}, {one['interface_problem']}"
    are_one_computer = len({one["identity"] for one in facts}) == 1
    for one in facts:
        if one["host_name_problem"] and not are_one_computer:
            host, reason, interface = one["host_name_problem"]
            yield (
                f"the name {host} of machine {one['rank']} {reason}. Set "
                f"GLOO_SOCKET_IFNAME={interface} there."
            )


def _differences(main: dict, one: dict) -> Iterator[str]:
    """Yield each reason why a machine cannot launch together with machine 0."""
    this, other = name_of(one), name_of(main)
    if one["code"] != main["code"]:
        yield f"accel_demo has different code on {this} and {other}. Copy it from one to the other."
    for package, version in one["versions"].items():
        if version != (usual := main["versions"][package]):
            yield (
                f"{this} has {package} {version}, but {other} has {usual}. "
                "Install the same version on both."
            )
    for setting, value in one["settings"].items():
        if value != (usual := main["settings"][setting]):
            yield (
                f"{setting} is {value} on {this}, but {usual} on {other}. Use "
                "the same launch config on both."
            )
    seconds = one["clock"] - main["clock"]
    if abs(seconds) > MOST_CLOCK_DIFFERENCE:
        direction = "ahead of" if seconds > 0 else "behind"
        yield (
            f"the clock of {this} is {abs(seconds):,.0f} s {direction} that of {other}. "
            "Synchronize both, for example with chrony."
        )


def notes_on(facts: list[dict]) -> list[str]:
    """Return a line about each host name that several machines have."""
    notes = []
    for host in dict.fromkeys(one["host"] for one in facts):
        same = [one for one in facts if one["host"] == host]
        if len({one["identity"] for one in same}) > 1:
            machines = " and ".join(f"machine {one['rank']}" for one in same)
            notes.append(
                f"Note: {machines} have the same host name, {host}, so errors during training do "
                "not say which one they mean."
            )
    return notes


def targets(facts: list[dict], rank: int, main_process_ip: str) -> dict[int, tuple[str, int]]:
    """Return where the processes of this machine would connect to each other machine.

    With NCCL, we do not know the address. We use the one that machine 0 has seen in the meeting.
    """
    addresses = {one["rank"]: one["gloo_address"] or one["address"] for one in facts}
    if not facts[0]["gloo_address"]:
        addresses[0] = main_process_ip
    return {
        one["rank"]: (addresses[one["rank"]], one["open_port"])
        for one in facts
        if one["rank"] != rank
    }


def connection_problem_in(attempts: list[dict], facts: list[dict]) -> str | None:
    """Return which machine cannot connect to which, in one line, or None if all can."""
    for one in facts:
        if one["rank"] not in [attempt["rank"] for attempt in attempts]:
            return f"the doctor on {name_of(one)} has ended. Start doctor again on all machines."
    for attempt in attempts:
        if not attempt["unreachable"]:
            continue
        rank, address, port, reason = attempt["unreachable"]
        this, other = facts[attempt["rank"]], facts[rank]
        advice = "Open all ports between the machines in the firewall"
        if other["gloo_address"]:
            advice += ", or set GLOO_SOCKET_IFNAME there to the interface that others can reach"
        return (
            f"{name_of(this)} cannot connect to {address}, port {port}, of {name_of(other)}: "
            f"{reason}. {advice}."
        )
    return None


def failures_in(reports: list[dict], names: dict[int, str]) -> list[str]:
    """Return one line for each machine on which the launch has failed."""
    failures = {one["rank"]: one["failure"] for one in reports}
    missing = "its doctor has ended, or cannot be reached"
    return [
        f"the launch failed on {name}: {failures.get(rank, missing)}"
        for rank, name in names.items()
        if failures.get(rank, missing)
    ]


def compare(
    path: Path,
    config: dict,
    promise: Promise,
    every: dict[int, list[ProbeAnswer]],
    rank: int,
    names: dict[int, str],
) -> int:
    """Print what is promised for each machine and what each obtained. Return 0 if all is equal."""
    on_one = replace(promise, processes=promise.processes // promise.machines)
    promised = promised_cells(on_one, promise.processes)
    everyone = [answer for answers in every.values() for answer in answers]
    obtained = {number: obtained_cells(answers, everyone) for number, answers in every.items()}
    columns = ["on each machine", "promised", *(f"machine {number}" for number in obtained)]
    differences = print_comparison(path, columns, promised, obtained)
    for number, different in differences.items():
        if different:
            display(f"Not as promised on {names[number]}: {', '.join(different)}")
        if number == rank:
            for _, lines in fixes(config, on_one, every[number], different):
                display("\n".join(f"  {line}" for line in lines))
    return 1 if differences else 0
