"""Test how launches and ends are told apart: in processes, and from recorded events alone."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from accel_demo.lab.audit.checks import deaths
from accel_demo.lab.audit.command import result_of, run_checks
from accel_demo.lab.audit.result import ERROR, NOTE, Finding
from accel_demo.lab.observed import observed_command
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.observed_command import ObservedCommand
from accel_demo.lab.observed.ranks import Rank, read_launches
from accel_demo.processes.cleanup import kill_all
from tests.conftest import run_to_end
from tests.observer.test_checks import OBSERVED

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP

def train(rank, file, end="pass"):
    dist.init_process_group("gloo", f"file://{os.path.abspath(file)}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 4), float(rank))).sum().backward()
        optimizer.step()
    if rank == 1:
        exec(end)
    dist.barrier()
    dist.destroy_process_group()

class Trainer(mp.Process):
    def run(self):
        train(*self._args)

if __name__ == "__main__":
"""
STARTS = """
    processes = [START(target=train, args=(rank, "store", "END")) for rank in range(2)]
    for process in processes: process.start()
    for process in processes: process.join()
"""
SPAWNS = '    mp.start_processes(train, ("FILE", "END"), nprocs=2, start_method="fork")\n'


def observe(folder: Path, lines: str) -> tuple[list[list[Rank]], SimpleNamespace]:
    """Run the script in one process that forks its ranks. Return its launches and its end."""
    events = folder / "events"
    events.mkdir()
    (folder / "script.py").write_text(SCRIPT + lines)
    command = ["python", OBSERVED, folder / "script.py"]
    ended = run_to_end(command, 60, cwd=folder, ACCEL_DEMO_AUDIT=str(events))
    launches = read_launches(events)
    assert [len(launch) for launch in launches] == [2] * len(launches), ended.stderr
    assert all(rank.connected_world == 2 for launch in launches for rank in launch)
    return launches, ended


def findings_of(launches: list[list[Rank]], ended: SimpleNamespace) -> list[Finding]:
    evidence = Evidence(launches[0], ended.returncode, ended.stdout + ended.stderr)
    evidence.other_launches = launches[1:]
    return run_checks(evidence)[0]


@pytest.mark.parametrize("start", ["mp.Process", "Trainer", "mp.spawn"])
@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("raise ValueError(7)", "Rank 1 failed with ValueError: 7"),
        ("sys.exit('no data')", "Rank 1 called sys.exit('no data')"),
        ("os.kill(os.getpid(), 9)", "Rank 1 ended without a Python error after 3 optimizer steps"),
    ],
)
def test_the_end_of_a_process_of_multiprocessing_is_reported(start, end, message, tmp_path):
    starts = SPAWNS.replace("FILE", "store") if start == "mp.spawn" else STARTS
    launches, ended = observe(tmp_path, starts.replace("START", start).replace("END", end))
    assert len(launches) == 1
    [finding] = findings_of(launches, ended)
    assert finding.sentence.startswith(message)
    assert finding.places[0].ranks == [1]
    if "kill" in end and start == "mp.spawn":
        assert "SIGKILL" in finding.sentence


def test_two_launches_are_not_one_and_the_second_one_is_named_as_not_checked(tmp_path):
    starts = SPAWNS.replace("END", "pass")
    twice = starts.replace("FILE", "first") + starts.replace("FILE", "second")
    launches, ended = observe(tmp_path, twice)
    assert ended.returncode == 0, ended.stderr
    first, second = launches
    assert first[0].events[-1]["time"] <= second[0].events[0]["time"]
    assert {rank.parent for launch in launches for rank in launch} != {0}
    assert findings_of(launches, ended) == []
    evidence = Evidence(first, 0, other_launches=[second])
    nothing = dict.fromkeys(("changed", "unseen", "new", "left"), [])
    result = result_of(evidence, nothing | {"all_watched": True, "not_restored": {}}, [], [])
    assert "another launch of 2 processes" in result.not_checked


def events_of(pid: int, parent: int, start: float, *, world: int = 1, number: int = 0) -> list:
    """Return the events of a process that trains from `start` for one second."""
    connecting = {"kind": "connecting", "time": start, "line": None, "rank": number, "world": world}
    return [
        {"kind": "process", "time": start, "pid": pid, "parent": parent, "variables": {}},
        *([connecting, connecting | {"kind": "connected"}] if world > 1 else []),
        {"kind": "step", "time": start + 1, "optimizer": 0, "line": ["train.py", 3, "main"]},
    ]


def launches_of(folder: Path, *processes: list[dict]) -> list[list[int]]:
    for events in processes:
        lines = "".join(json.dumps(event) + "\n" for event in events)
        (folder / f"{events[0]['pid']}.jsonl").write_text(lines)
    return [[rank.pid for rank in launch] for launch in read_launches(folder)]


def test_a_program_that_a_rank_starts_is_no_rank(tmp_path):
    ranks = [events_of(2 + n, 1, 5.0, world=2, number=n) for n in range(2)]
    assert launches_of(tmp_path, *ranks, events_of(9, 2, 5.5)) == [[2, 3], [9]]


def test_a_rank_that_starts_the_others_is_one_of_them(tmp_path):
    main = events_of(1, 0, 5.0, world=2)
    others = [events_of(2, 1, 5.1, world=2, number=1)]
    assert launches_of(tmp_path, main, *others) == [[1, 2]]


def test_launches_of_different_sizes_are_not_one(tmp_path):
    """The second launch's rank 1 begins before its rank 0."""
    ranks = [events_of(3 - n, 9, 5.0 + n, world=2, number=1 - n) for n in range(2)]
    assert launches_of(tmp_path, events_of(1, 9, 1.0), *ranks) == [[2, 3], [1]]


def test_the_launch_in_several_processes_is_audited_even_if_one_process_trains_before(tmp_path):
    ranks = [events_of(2 + n, 1, 5.0, world=2, number=n) for n in range(2)]
    assert launches_of(tmp_path, events_of(1, 0, 1.0), *ranks) == [[2, 3], [1]]


def ended_rank(number: int, kind: str | None = None, message: str = "", last: str = "end") -> Rank:
    """Return a rank with an error, or one that ended without an error, or was killed (last="")."""
    events = events_of(10 + number, 1, 5.0, world=2, number=number)
    error = {"type": kind, "message": message, "places": [["train.py", 3, "main"]]}
    events += (
        [{"kind": last, "time": 7.0 + number, "error": error if kind else None}] if last else []
    )
    events += [{"kind": "end", "time": 9.0, "error": None}] if last == "exit" else []
    return Rank(10 + number, number, 2, events)


CLOSED = ("RuntimeError", "[pair.cc:547] Connection closed by peer")
TORCHRUN = "Sending process 10 closing signal SIGTERM\n"
TORCHRUN += "E1126 api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 11) of binary: python\n"


@pytest.mark.parametrize(
    ("ranks", "code", "log", "start", "cure"),
    [
        (
            [ended_rank(0, last=""), ended_rank(1, last="")],
            1,
            TORCHRUN,
            "Rank 1 ended without a Python error after 1 optimizer steps (killed by SIGKILL)",
            "perhaps memory ran out",
        ),
        (
            [ended_rank(0), ended_rank(1)],
            1,
            TORCHRUN.replace("-9", "3"),
            "Rank 1 ended without a Python error after 1 optimizer steps (exit code 3)",
            "`SystemExit`",
        ),
        (
            [ended_rank(0, *CLOSED), ended_rank(1, "KeyError", "7")],
            1,
            "",
            "Rank 1 failed with KeyError: 7",
            "Repair this error. The other ranks failed only because of this.",
        ),
        (
            [ended_rank(0, "KeyError", "7"), ended_rank(1, "KeyError", "8")],
            1,
            "",
            "All ranks failed with KeyError: 7",
            "Repair this error.",
        ),
        (
            [ended_rank(0, "KeyError", "7"), ended_rank(1, "ValueError", "8")],
            1,
            "",
            "Rank 0 failed with KeyError: 7",
            "Repair this error. It happened first.",
        ),
        (
            [ended_rank(0, "SystemExit", "2", "exit"), ended_rank(1, "SystemExit", "2", "exit")],
            1,
            f"give --data\n{TORCHRUN}",
            "All ranks called sys.exit(2)",
            "Repair what the output reports: give --data",
        ),
        (
            [ended_rank(0, *CLOSED), ended_rank(1, *CLOSED)],
            5,
            f"the license has expired\n{TORCHRUN}",
            "The command failed with exit code 5. The last lines of its output:\n"
            "      the license has expired",
            "",
        ),
        (
            [ended_rank(0, "ConnectionError", "Read timed out"), ended_rank(1)],
            1,
            "",
            "Rank 0 failed with ConnectionError: Read timed out",
            "Repair this error.",
        ),
    ],
)
def test_a_failed_command_is_explained_by_what_was_seen(ranks, code, log, start, cure):
    findings, _ = run_checks(Evidence(ranks, code, log))
    [finding] = [each for each in findings if each.check == "deaths"]
    sentence = finding.sentence.replace("Ranks 0, 1", "All ranks")
    assert sentence.startswith(start) and cure in finding.cure
    assert "only because" in cure or "only because" not in finding.cure


def test_an_error_after_a_shortened_pass_may_be_caused_by_the_audit():
    ranks = [ended_rank(0, "KeyError", "7"), ended_rank(1, "KeyError", "7")]
    for rank, whole in ((ranks[0], 8), (ranks[1], 40)):
        rank.events.insert(-1, {"kind": "pass end", "time": 6.0, "batches": 8, "whole": whole})
    [whole] = deaths.check(Evidence(ranks[:1], 1))
    [shortened] = deaths.check(Evidence(ranks, 1))
    assert "--batches 0" in shortened.cure and "--batches" not in whole.cure


@pytest.mark.parametrize("code", [0, None])
def test_an_exit_that_the_script_catches_or_that_the_audit_causes_is_no_finding(code):
    """The exit code is None if the audit has stopped the command."""
    exits = [ended_rank(0, "SystemExit", "2", "exit"), ended_rank(1, "SystemExit", "2", "exit")]
    steps = [ended_rank(0), ended_rank(1)]
    for rank in steps:
        rank.events.insert(-1, {"kind": "enough", "time": 7.0, "steps": 1})
    assert [*deaths.check(Evidence(exits, 0))] == [*deaths.check(Evidence(steps, code))] == []
    assert [*deaths.unexplained(Evidence(steps, code or 1), [])] == []


@pytest.mark.parametrize("log", ["", TORCHRUN.replace("-9", "-6")])
def test_what_happens_after_the_audit_has_ended_the_training_is_no_finding(log):
    """A rank may lose its connection, be stopped by torchrun, abort, or fail in a `finally`."""
    for other in (ended_rank(1, last=""), ended_rank(1), ended_rank(1, "ValueError", "too late")):
        ranks = [ended_rank(0), other]
        for rank in ranks:
            rank.events.insert(1, {"kind": "enough", "time": 0.5, "steps": 1})
        assert [*deaths.check(Evidence(ranks, 1, log))] == []


def test_an_abort_after_the_last_line_of_all_ranks_is_only_a_note():
    """A gloo thread may need the GIL while Python exits. tests/processes/test_exit.py shows how."""
    log = deaths.ABORT + "\n" + TORCHRUN.replace("-9", "-6")
    [of_both] = deaths.check(Evidence([ended_rank(0), ended_rank(1)], 1, log))
    [of_rank_0] = deaths.check(Evidence([ended_rank(0, last=""), ended_rank(1)], 1, log))
    [in_loop] = deaths.check(Evidence([ended_rank(0, last=""), ended_rank(1, last="")], 1, log))
    assert [each.verdict for each in (of_both, of_rank_0, in_loop)] == [NOTE, ERROR, ERROR]
    assert of_both.sentence.startswith("Rank 1 aborted after its last line")
    assert of_both.sentence == of_rank_0.sentence and "(killed by SIGABRT)" in in_loop.sentence
    assert "nothing is lost" in of_both.cure and "nothing is lost" not in of_rank_0.cure


def test_after_lost_events_only_the_ends_are_checked():
    ranks = [ended_rank(0), ended_rank(1, "KeyError", "7")]
    ranks[0].events.append({"kind": "lost", "time": 9.0})
    findings, skipped = run_checks(Evidence(ranks, 1))
    assert [finding.check for finding in findings] == ["deaths"]
    assert skipped["samples"] == "events of rank 0 were lost (is a disk full?)"


def test_the_line_of_a_crash_is_found_with_the_libraries_of_the_rank():
    crash = 'Fatal Python error\n  File "/py/lib/threading.py", line 5 in wait\n'
    crash += '  File "train.py", line 7 in main\n'
    known = {"kind": "libraries", "libraries": ["/py/lib/"], "script_folder": ""}
    assert Rank(1, 0, 1, [known], crash=crash).crash_line == ["train.py", 7, "main"]


@pytest.fixture
def observed(tmp_path, monkeypatch):
    """Yield an `ObservedCommand` whose command has two children, and their process IDs."""
    monkeypatch.setattr(observed_command, "ANSWER_TIMEOUT", 0.01)
    command = ObservedCommand(tmp_path, {}, 60)
    shell = ["sh", "-c", "sleep 60 & sleep 60 & echo started; wait"]
    with subprocess.Popen(shell, stdout=subprocess.PIPE) as command.keeper:
        assert command.keeper.stdout
        command.keeper.stdout.readline()
        children = psutil.Process(command.keeper.pid).children()
        assert len(children) == 2
        try:
            yield command, [child.pid for child in children]
        finally:
            kill_all(children)


def test_ranks_hang_only_if_no_other_rank_may_be_on_its_way(observed, tmp_path):
    command, (first, second) = observed
    launches_of(tmp_path, events_of(first, 0, 5.0, world=2)[:2])  # it waits for another rank
    command.look_for_a_hang()
    assert not command.hang
    process = psutil.Process(second)
    process.kill()
    psutil.wait_procs([process], 5)
    command.look_for_a_hang()
    assert command.hang


def test_a_rank_that_goes_on_after_a_pause_is_not_reported(observed, tmp_path):
    command, (first, _) = observed
    launches_of(tmp_path, events_of(first, 0, 5.0, world=2))
    answer = {"collectives": [], "stack": [], "line": ["train.py", 7, "main"]}
    command.ask = lambda ranks: (tmp_path / f"{first}.answer").write_text(json.dumps(answer))
    command.look_for_a_hang()
    assert len(command.waits) == 1 and command.waits[0].startswith("rank 0 waits at train.py:7")
    with open(tmp_path / f"{first}.jsonl", "a") as file:
        file.write('{"kind": "step", "time": 9.0}\n')
    assert command.waits == []
