"""Simulate the nodes of exercise 44: each rank, its six actions, and the log of what happens.

Each node is a folder that only its own ranks use, and all nodes share one more folder. The ranks
append events to one file, in the order in which they happen.

An action that takes time pauses halfway until no other rank can continue without it. So a mistake
such as a missing barrier shows up in every run, not only when the timing is unlucky.
"""

import json
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grading
from grading import dist, torch
from ranks import begin_rank, end_rank

from accel_demo.files import write_whole

LONGEST_WAIT = 3  # seconds an action is paused at most, in case a rank never stops running
SAMPLES = list(range(60))
CORRECT = len([number for number in SAMPLES if number % 7])  # what evaluate returns
COLLECTIVES = (
    "allgather", "_allgather_base", "allreduce", "alltoall", "alltoall_base", "barrier",
    "broadcast", "gather", "monitored_barrier", "reduce", "_reduce_scatter_base", "reduce_scatter",
    "scatter",
)  # fmt: skip
# States of a rank
RUNNING, WAITING, HOLDING, ENDED = "running", "waiting", "holding", "ended"


@dataclass(frozen=True)
class Layout:
    """Number of ranks on each node, and the order in which paused actions continue."""

    ranks_per_node: tuple[int, ...]
    is_last_rank_first: bool = False

    @property
    def world_size(self) -> int:
        return sum(self.ranks_per_node)

    @property
    def order(self) -> list[int]:
        """All ranks. If several of them are paused in an action, the first one continues first."""
        return sorted(range(self.world_size), reverse=self.is_last_rank_first)

    def place(self, rank: int) -> tuple[int, int]:
        """Return the rank's node and its local rank."""
        places = [(n, i) for n, count in enumerate(self.ranks_per_node) for i in range(count)]
        return places[rank]

    def ranks_on(self, node: int) -> list[int]:
        return [rank for rank in range(self.world_size) if self.place(rank)[0] == node]


@dataclass(frozen=True)
class Event:
    """One line of the log. `line` is the line of the learner's file, or 0."""

    rank: int
    name: str
    line: int = 0
    details: dict[str, Any] = field(default_factory=dict)


class Log:
    """A file with the events of all ranks, in order, because appending a line is atomic."""

    def __init__(self, path: Path):
        self.path = path

    def add(self, event: Event) -> None:
        line = json.dumps([event.rank, event.name, event.line, event.details]) + "\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, line.encode())
        os.close(descriptor)

    def events(self) -> list[Event]:
        if not self.path.exists():
            return []
        complete = self.path.read_text(encoding="utf-8").rpartition("\n")[0]
        return [Event(*json.loads(line)) for line in complete.splitlines()]


def states(events: list[Event], world_size: int) -> list[str]:
    """Return what each rank is doing after these events.

    A rank in a collective is running if all members have called it, and waiting otherwise.
    """
    entered = {}  # {group: {rank: calls of collectives}}
    last: dict[int, Event] = {}
    for event in events:
        last[event.rank] = event
        if event.name == "enter":
            counts = entered.setdefault(event.details["group"], {})
            counts[event.rank] = counts.get(event.rank, 0) + 1

    def state(event: Event | None) -> str:
        if event is not None and event.name == "enter":
            counts = entered[event.details["group"]]
            others = [counts.get(rank, 0) for rank in event.details["members"]]
            return WAITING if min(others) < counts[event.rank] else RUNNING
        names = {"hold": HOLDING, "return": ENDED, "fail": ENDED}
        return RUNNING if event is None else names.get(event.name, RUNNING)

    return [state(last.get(rank)) for rank in range(world_size)]


def run_rank(rank: int, answer: Path, folder: Path, layout: Layout, port: int) -> None:
    """Call the learner's function on this rank, and write a report. Does not return."""
    begin_rank(rank, layout.world_size, port)
    node, local_rank = layout.place(rank)
    os.environ["LOCAL_RANK"] = str(local_rank)
    os.environ["LOCAL_WORLD_SIZE"] = str(layout.ranks_per_node[node])
    os.environ["GROUP_RANK"] = str(node)  # torchrun's variable for the number of the node
    log = Log(folder / "log")
    threading.Thread(target=end_with_parent, daemon=True).start()
    failure = f"rank {rank} raised an error"
    report = grading.fill_in({}, observe, answer, folder, layout, log, failure=failure)
    if report["mistake"]:
        log.add(Event(rank, "fail", 0, {"mistake": report["mistake"]}))
    end_rank(folder / "reports", rank, layout.world_size, report)


def end_with_parent() -> None:
    """End this process when the grader has ended, even if it was killed."""
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


def observe(answer: Path, folder: Path, layout: Layout, log: Log) -> list[dict]:
    """Connect the ranks and call the learner's function. Return how they are connected."""
    from accelerate import PartialState

    state, connected = PartialState(cpu=True), dist.get_world_size()
    node, local_rank = layout.place(state.process_index)
    group = dist.new_group()
    if (state.num_processes, connected) != (layout.world_size, layout.world_size):
        raise RuntimeError(f"{connected} processes are connected")
    if (state.local_process_index, state.is_local_main_process) != (local_rank, local_rank == 0):
        raise RuntimeError(f"Accelerate uses {state.local_process_index} as the local rank")
    dist.barrier()
    blocks = Blocks()
    record_blocks(blocks)
    record_collectives(log, state.process_index, blocks)
    actions = Actions(state.process_index, folder, layout, log, group)
    returned = grading.import_answer(answer).run(state, actions)
    actions.add("return", value=repr(returned), is_right=actions.is_right(returned))
    return [{"connected": connected, "node": node, "local_rank": local_rank}]


@dataclass
class Blocks:
    """The `main_process_first` and `local_main_process_first` blocks that this rank is in.

    `lines` are the lines of the `with` statements, the outermost first. `at` is
    "entry" or "exit" if the rank is at the barrier of such a block, and "" otherwise.
    """

    lines: list[int] = field(default_factory=list)
    at: str = ""


def record_blocks(blocks: Blocks) -> None:
    """Keep `blocks` up to date. `Accelerator` calls the same methods."""
    from accelerate import PartialState

    def recording(name: str) -> Callable:
        method = getattr(PartialState, name)

        @contextmanager
        def block(state: PartialState) -> Iterator[None]:
            line, blocks.at = line_of_answer(), "entry"
            with method(state):
                blocks.lines.append(line)
                blocks.at = ""
                yield  # the lines of the block
                blocks.lines.pop()
                blocks.at = "exit"
            blocks.at = ""

        return block

    for name in ("main_process_first", "local_main_process_first"):
        setattr(PartialState, name, recording(name))


def record_collectives(log: Log, rank: int, blocks: Blocks) -> None:
    """Add an event to the log before and after each collective of PyTorch."""

    def recording(name: str) -> Callable:
        method = getattr(dist.ProcessGroup, name)

        def call(group, *arguments, **options):
            members = dist.get_process_group_ranks(group)
            details = {"group": group.group_name, "members": members, "collective": name}
            place = {"blocks": blocks.lines, "at": blocks.at}
            log.add(Event(rank, "enter", line_of_answer(), details | place))
            work = method(group, *arguments, **options)
            if work is not None:
                work.wait()
            log.add(Event(rank, "leave", line_of_answer()))
            return work

        return call

    for name in COLLECTIVES:
        setattr(dist.ProcessGroup, name, recording(name))


def line_of_answer() -> int:
    """Return the line of the learner's file that is now running, or 0."""
    frames = traceback.walk_stack(sys._getframe())
    return next((line for frame, line in frames if grading.is_in_answer(frame)), 0)


class Actions:
    """The six actions that a rank may call. The exercise describes them."""

    def __init__(self, rank: int, folder: Path, layout: Layout, log: Log, group: Any):
        self._rank, self._layout, self._log, self._group = rank, layout, log, group
        self._node, self._local_rank = layout.place(rank)
        self._disk, self._shared = folder / f"node-{self._node}", folder / "shared"

    def open_run(self) -> Path:
        self.add("open_run")
        if existing := sorted(self._shared.glob("run-*")):
            return existing[0]
        run = self._shared / f"run-{time.time_ns()}-{self._rank}"
        self.add("create run")
        self._hold()
        run.mkdir()
        return run

    def download(self) -> None:
        self.add("download")
        with (self._disk / "data.txt").open("w", encoding="utf-8") as file:
            file.write(" ".join(map(str, SAMPLES[:30])))
            self._hold()
            file.write(f" {' '.join(map(str, SAMPLES[30:]))}")
        self.add("downloaded")

    def prepare(self) -> list[int]:
        self.add("prepare")
        data, cache = self._disk / "data.txt", self._disk / "cache.json"
        if cache.exists():
            return json.loads(cache.read_text(encoding="utf-8"))
        if not data.exists() or len(data.read_text(encoding="utf-8").split()) < len(SAMPLES):
            self._hold()  # so that the log shows whether another rank downloads
            self._refuse("no data")
        self.add("build cache")
        self._hold()
        self._write(
            cache,
            json.dumps([int(word) for word in data.read_text(encoding="utf-8").split()]),
            "built",
        )
        return json.loads(cache.read_text(encoding="utf-8"))

    def evaluate(self, samples: list[int]) -> int:
        if not isinstance(samples, list) or samples != SAMPLES:
            self._refuse("bad samples", samples=grading.shorten(samples, 60))
        self.add("evaluate")
        share = samples[self._rank :: self._layout.world_size]
        wrong = [number for number in share if number % 7 == 0]
        correct = torch.tensor(len(share) - len(wrong))
        dist.all_reduce(correct, group=self._group)
        self._hold()
        self._write(self._disk / f"mistakes-{self._rank}.txt", f"{wrong}\n", "evaluated")
        return int(correct)

    def save(self, run: Path, correct: int) -> None:
        if not self.is_right((run, correct)):
            self._refuse("bad save", values=grading.shorten((run, correct), 60))
        self.add("save")
        self._hold()
        self._write(Path(run, "checkpoint.json"), json.dumps({"correct": correct}), "saved")

    def clean_up(self) -> None:
        self.add("clean_up")
        files = sorted(self._disk.glob("mistakes-*.txt"))
        lines = "".join(file.read_text(encoding="utf-8") for file in files)
        (self._shared / f"mistakes-of-node-{self._node}.txt").write_text(lines, encoding="utf-8")
        for file in self._disk.iterdir():
            file.unlink(missing_ok=True)
        self.add("cleaned up")

    def add(self, name: str, **details) -> None:
        """Add an event to the log."""
        self._log.add(Event(self._rank, name, line_of_answer(), details))

    def is_right(self, values) -> bool:
        """Return True if these are the folder of the run and the result of evaluate."""
        if not isinstance(values, tuple | list) or len(values) != 2:
            return False
        run, correct = values
        is_run = isinstance(run, str | Path) and Path(run) in self._shared.glob("run-*")
        return is_run and not isinstance(correct, bool) and correct == CORRECT

    def _write(self, path: Path, text: str, event: str) -> None:
        # If a rank waits for the file, the event must come before what the rank does next.
        self.add(event)
        write_whole(path, text)

    def _hold(self) -> None:
        """Pause until no other rank is running and no earlier rank in `order` is paused."""
        self.add("hold")
        deadline = time.monotonic() + LONGEST_WAIT
        while time.monotonic() < deadline:
            rank_states = states(self._log.events(), self._layout.world_size)
            holding = [rank for rank in self._layout.order if rank_states[rank] == HOLDING]
            if RUNNING not in rank_states and holding[0] == self._rank:
                break
            time.sleep(0.003)
        self.add("resume")

    def _refuse(self, name: str, **details) -> None:
        """Add an event that explains why the action is impossible, and end this process."""
        self.add(name, **details)
        self.add("fail", mistake=f"rank {self._rank} cannot continue")
        os._exit(1)
