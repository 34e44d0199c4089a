"""Test the simulated nodes of exercise 44, and how its grader judges their log."""

import ast
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from grading import Wrong

from accel_demo.lab.course.exercises import all_exercises
from accel_demo.processes.environment import environment_for
from tests.conftest import BIN, REPOSITORY
from tests.exercises.test_matrix import is_rejected, sections_named_in
from tests.pages.pages import EXERCISES, check

EXERCISE = all_exercises()["44"]
GRADERS = EXERCISES / "graders"


@pytest.fixture
def nodes(monkeypatch):
    monkeypatch.syspath_prepend(GRADERS)
    return importlib.import_module("nodes_44")


@pytest.fixture
def judge(nodes):
    return importlib.import_module("judge_44")


# An answer whose processes each write a file with their ranks and the IDs of connected processes.
NOTES = """import json, os
from pathlib import Path

import torch.distributed as dist


def run(state, actions):
    connected = [None] * state.num_processes
    dist.all_gather_object(connected, os.getpid())
    own = state.process_index, state.local_process_index, state.is_local_main_process
    node = os.environ["GROUP_RANK"], os.environ["LOCAL_WORLD_SIZE"]
    note = {"connected": connected, "own": own, "node": list(map(int, node))}
    Path(os.environ["NOTES"], str(os.getpid())).write_text(json.dumps(note))
    return ours(state, actions)


"""


def test_the_check_connects_four_processes_on_two_nodes_and_then_on_two_others(start, tmp_path):
    file, notes = tmp_path / "answer.py", tmp_path / "notes"
    notes.mkdir()
    file.write_text(NOTES + EXERCISE.answer.read_text().replace("def run", "def ours"))
    result = check(start, "44", file, NOTES=str(notes))
    assert (result.returncode, result.stderr) == (0, ""), result.stdout
    runs = {}  # {process IDs of a run: notes of its processes}
    for note in map(json.loads, [path.read_text() for path in notes.iterdir()]):
        runs.setdefault(tuple(note["connected"]), []).append((*note["own"], *note["node"]))
    assert [len(set(run)) for run in runs] == [4, 4]
    assert len(set(sum(runs, ()))) == 8 == len(list(notes.iterdir()))
    expected = [
        [(0, 0, True, 0, 2), (1, 1, False, 0, 2), (2, 0, True, 1, 2), (3, 1, False, 1, 2)],
        [(0, 0, True, 0, 3), (1, 1, False, 0, 3), (2, 2, False, 0, 3), (3, 0, True, 1, 1)],
    ]
    assert sorted(sorted(places) for places in runs.values()) == sorted(expected)


# Run an answer once on two nodes with two ranks each, and print the files that it leaves.
ONE_RUN = """import importlib, sys, time
from pathlib import Path

grader = importlib.import_module("44")
answer, folder = Path(sys.argv[1]), Path(sys.argv[2])
grader.start_server()
grader.run_and_judge(answer, folder, grader.LAYOUTS[0], time.monotonic() + 100)
print(*sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()))
events = grader.Log(folder / "log").events()
print(*(f"{event.rank}:{event.name}" for event in events if event.name not in ("enter", "leave")))
"""


def test_a_right_answer_leaves_one_checkpoint_and_empty_disks(start, tmp_path):
    command = ["python", "-c", ONE_RUN, EXERCISE.answer, tmp_path]
    result = start(command, PYTHONPATH=f"{GRADERS}:{REPOSITORY}")
    assert (result.returncode, result.stderr) == (0, "")
    files, events = result.stdout.splitlines()
    *reports, mistakes_0, mistakes_1, checkpoint = files.removeprefix("log ").split()
    assert reports == [f"reports/4-{rank}.json" for rank in range(4)]  # four processes, connected
    assert re.fullmatch(r"shared/run-\d+-0/checkpoint\.json", checkpoint)
    assert [mistakes_0, mistakes_1] == [f"shared/mistakes-of-node-{node}.txt" for node in (0, 1)]
    for name, count in {"create run": 1, "download": 2, "build cache": 2, "prepare": 4}.items():
        assert len(re.findall(rf"\d:{name}\b", events)) == count


def event(nodes, text: str):
    """Return the event of "0 enter world": rank, name, and the group of a collective."""
    rank, name, *group = text.split()
    details = {"group": group[0], "members": [0, 1, 2], "collective": "barrier"} if group else {}
    return nodes.Event(int(rank), name, 1, details)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ("", "running running running"),
        ("0 enter world", "waiting running running"),
        ("0 enter world, 1 enter world, 2 enter world", "running running running"),
        ("0 enter world, 1 enter world, 2 enter world, 2 leave", "running running running"),
        ("0 enter world, 1 enter world, 2 enter other", "waiting waiting waiting"),
        ("0 enter world, 0 leave, 1 hold, 2 return", "running holding ended"),
        ("1 hold, 1 resume, 2 fail", "running running ended"),
    ],
)
def test_a_rank_waits_until_all_have_called_the_same_collective(nodes, texts, expected):
    events = [event(nodes, text) for text in texts.split(", ") if text]
    assert " ".join(nodes.states(events, 3)) == expected


def test_places_of_ranks(nodes):
    layout = nodes.Layout((3, 1), is_last_rank_first=True)
    assert layout.order == [3, 2, 1, 0]
    assert [layout.place(rank) for rank in range(4)] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert [layout.ranks_on(node) for node in (0, 1)] == [[0, 1, 2], [3]]


EVALUATED = "0 evaluate, 1 evaluate, 0 evaluated, 1 evaluated"


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("0 create run, 2 download", ""),
        ("0 download, 2 download, 1 prepare, 3 prepare", ""),
        ("0 download, 0 download", "rank 0 downloads twice"),
        ("0 no data", "no rank has downloaded to node 0's disk yet"),
        ("0 download, 0 downloaded, 2 no data", "node 1 never downloads: rank 0 has"),
        ("2 download, 3 no data", "rank 3 calls prepare before rank 2 has downloaded everything"),
        ("0 download, 0 clean_up", "rank 0 cleans up node 0's disk before it has called evaluate"),
        ("1 clean_up", "rank 1 cleans up node 0's disk before it has called evaluate"),
        ("2 evaluate, 3 evaluate, 2 evaluated, 2 clean_up", "while rank 3 on the same node is sti"),
        (f"{EVALUATED}, 0 clean_up, 3 evaluate", ""),
        (f"{EVALUATED}, 0 clean_up, 0 clean_up", "cleans up node 0's disk twice"),
        (f"{EVALUATED}, 0 clean_up, 1 no data", "calls prepare after rank 0 has deleted"),
        ("1 save, 1 save", "rank 1 calls save twice"),
        ("3 evaluate, 3 evaluate", "rank 3 calls evaluate twice"),
    ],
)  # fmt: skip
def test_the_first_mistake_in_the_log_is_explained(nodes, judge, log, message):
    texts = [text.partition(" ") for text in log.split(", ")]
    events = [nodes.Event(int(rank), name, 1) for rank, _, name in texts]
    mistake = ""
    try:
        judge.judge_order(events, nodes.Layout((2, 2)))
    except Wrong as wrong:
        mistake = str(wrong)
    assert message in mistake and bool(message) == bool(mistake)


def barrier(nodes, *places: str):
    """Return the event of each rank at a barrier: "9 in 8" is line 9, inside the block on line 8.

    "9 entry" and "9 exit" are the barriers of the block on line 9.
    """
    events = []
    for rank, place in enumerate(places):
        line, *more = place.split()
        blocks = [int(more[1])] if "in" in more else []
        at = more[0] if more and not blocks else ""
        details = {"group": "world", "members": [0, 1, 2, 3], "collective": "barrier"}
        events.append(nodes.Event(rank, "enter", int(line), details | {"blocks": blocks, "at": at}))
    return events


RANK_1_IS_EARLY = ", so rank 1 entered its `with` block too early"


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        (["8", "8", "8", "8"], ""),
        (["8 exit", "8 entry", "8 exit", "8 entry"], ""),
        (["9 in 8", "8 entry", "8 entry", "8 entry"], ""),  # a barrier inside the block
        (["8", "9 entry", "8"], ""),  # rank 3 has not reached it yet
        (["8", "9 entry", "8", "9 entry"], f"0's barrier (line 8), 1's (line 9){RANK_1_IS_EARLY}"),
        (["9 exit", "9 entry", "8", "8"], "0's barrier (line 9), 2's (line 8)"),
        (["8", "9", "8", "9"], "0's barrier (line 8), 1's (line 9)"),
    ],
)
def test_ranks_at_different_places_of_one_barrier_are_found(nodes, judge, places, expected):
    complete = judge.complete_barriers(barrier(nodes, *places))
    pairs = [judge.mismatch(one[0], one) for one in complete]
    message = "".join(judge.describe_mismatch(pair) for pair in pairs if pair)
    assert message.removeprefix("rank ").replace(" was matched with rank", ",") == expected


MATCHED = "rank 0's barrier (line 8) was matched with rank 1's (line 9)"
DISK = "rank 1 calls prepare before rank 0 has downloaded everything to node 0's disk"


@pytest.mark.parametrize(
    ("places", "calls_evaluate", "expected"),
    [
        (["8", "8", "8", "8"], False, DISK),
        (
            ["8", "9 entry", "8", "9 entry"],
            False,
            f"{MATCHED}{RANK_1_IS_EARLY}: {DISK}. All ranks must reach the same barriers in the "
            "same order",
        ),
        (  # which may be intended
            ["8", "9", "8", "9"],
            False,
            f"{DISK}. Is this because {MATCHED}?",
        ),
        (["8", "9 entry", "8", "9 entry"], True, DISK),
    ],
)
def test_a_mismatched_barrier_is_the_cause_if_it_is_the_last_collective(
    nodes, judge, places, calls_evaluate, expected
):
    events = [nodes.Event(0, "download"), *barrier(nodes, *places)]
    if calls_evaluate:
        details = {**events[-1].details, "group": "1", "collective": "allreduce", "at": ""}
        events.append(nodes.Event(1, "enter", 10, details))
    with pytest.raises(Wrong) as caught:
        judge.judge_order([*events, nodes.Event(1, "no data")], nodes.Layout((2, 2)))
    assert (str(caught.value), caught.value.read) == (expected, "Global or local main process?")


def test_a_right_answer_with_a_barrier_inside_a_block_gets_a_remark(start, tmp_path):
    file, text = tmp_path / "answer.py", EXERCISE.answer.read_text()
    call = "folder = actions.open_run()\n"
    file.write_text(text.replace(call, f"{call}        state.wait_for_everyone()\n"))
    result = check(start, "44", file)
    line = text.splitlines().index(f"        {call.rstrip()}") + 1
    assert (result.returncode, result.stderr) == (0, ""), result.stdout
    assert result.stdout.endswith(
        f"1 on the other. But the barrier on line {line + 1} works only because it happens to "
        f"match the barrier of the `with` block on line {line - 1}. Call it after the block\n"
    )


def test_the_exercise_describes_exactly_the_actions_there_are(nodes):
    tree = ast.parse(EXERCISE.original.read_text())
    described = re.findall(r"^\d\.  (\w+)\(", ast.get_docstring(tree) or "", re.MULTILINE)
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = [call.attr for call in calls if isinstance(call, ast.Attribute)]
    assert described == called
    assert len(described) == 6
    helpers = {"add", "is_right"}
    public = {name for name in vars(nodes.Actions) if not name.startswith("_")}
    assert set(described) == public - helpers


def test_every_section_that_the_judge_names_is_on_the_page():
    headings = re.findall(r"^##+ (.*)$", EXERCISE.page.read_text(), re.MULTILINE)
    sections = sections_named_in(GRADERS / "judge_44.py")
    assert len(sections - {""}) >= 2
    assert sections <= {*headings, ""}


@pytest.mark.slow
def test_an_endless_loop_ends_after_15_seconds(start, tmp_path):
    file = tmp_path / "answer.py"
    file.write_text("def run(state, actions):\n    while True:\n        pass\n")
    result = check(start, "44", file)
    message = "it has not finished after 15 s: ranks 0, 1, 2 and 3 have not"
    assert is_rejected(result, "44", message, is_late=True)


# An answer that survives Ctrl-C, after each process has written its ID to a file.
STUBBORN = """import os, pathlib, time


def run(state, actions):
    pathlib.Path(os.environ["PIDS"], str(os.getpid())).touch()
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_check_leaves_no_rank(tmp_path, number):
    """SIGKILL is sent to the grader, and the other signals to `accel-demo check`."""
    file, pids = tmp_path / "answer.py", tmp_path / "pids"
    file.write_text(STUBBORN)
    pids.mkdir()
    command = [sys.executable, BIN / "accel-demo", "check", "44", "--file", file]
    environment = environment_for({"PIDS": str(pids), "ACCEL_DEMO_PATIENCE": "100"})
    checked = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 90
        while len(list(pids.iterdir())) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        ranks = [psutil.Process(int(path.name)) for path in pids.iterdir()]
        assert len(ranks) == 4
        if number == signal.SIGKILL:
            [grader] = psutil.Process(checked.pid).children()
            os.kill(grader.pid, number)
            assert checked.wait(60)
        else:
            checked.send_signal(number)
            assert checked.wait(60) == 128 + number
        assert not psutil.wait_procs(ranks, 30)[1]
    finally:
        checked.kill()
