"""Read the events that the observer has written: one `Rank` per training process of a launch."""

import json
import re
import zlib
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from accel_demo.observer.events import belongs_to_script, read_events, read_file

# Events that only a training process causes. A launcher also imports torch.
OF_TRAINING = {"connecting", "connected", "spawned", "accelerator", "batch", "backward", "step"}
# Errors with which a launcher reports that one of its processes has failed
OF_LAUNCHERS = {
    "CalledProcessError",
    "ChildFailedError",
    "ProcessExitedException",
    "ProcessRaisedException",
    "SignalException",
}

CONNECTION = ("Connection closed", "Connection reset", "Broken pipe", "pair closure", "imed out")


@dataclass(eq=False)
class Rank:
    """One training process and its events, in the order in which they happened.

    `collectives` are the last ones, from the Flight Recorder, and `stack` the Python stack of
    the main thread while the process was waiting, innermost frame first.
    """

    pid: int
    number: int
    world: int  # the number of processes that the launcher started
    events: list[dict]
    collectives: list[dict] = field(default_factory=list)
    stack: list = field(default_factory=list)
    waiting_line: list | None = None  # the innermost line of the script in `stack`
    crash: str = ""  # what faulthandler has written when the process crashed
    draws_of_workers: list[dict] = field(default_factory=list)  # see observer/randomness.py
    streams_of_workers: list[dict] = field(default_factory=list)  # see observer/streams.py

    def of(self, *kinds: str) -> list[dict]:
        return [event for event in self.events if event["kind"] in kinds]

    def first(self, kind: str) -> dict | None:
        return next(iter(self.of(kind)), None)

    @cached_property
    def connected_world(self) -> int:
        """Number of processes that this rank is connected to, itself included."""
        return max([event["world"] for event in self.of("connected")], default=1)

    @cached_property
    def requested_world(self) -> int:
        """Number of processes that this rank has tried to connect, at least `world`."""
        return max([event["world"] or 1 for event in self.of("connecting")] + [self.world])

    @property
    def parent(self) -> int:
        """ID of the closest observed process above this one, or 0."""
        return self.events[0].get("parent", 0)

    @property
    def restarts(self) -> int:
        return int(self.events[0]["variables"].get("TORCHELASTIC_RESTART_COUNT", 0))

    @property
    def is_of_torchrun(self) -> bool:
        return "TORCHELASTIC_RESTART_COUNT" in self.events[0]["variables"]

    @cached_property
    def end(self) -> dict | None:
        """How the process ended, or None if it was killed."""
        return next(reversed(self.of("end")), None)

    @cached_property
    def error(self) -> dict | None:
        """The error that ended the process, or the call of `sys.exit` with which it ended."""
        if self.end and not self.end["error"]:
            before = [each for each in self.events if each["kind"] in OF_TRAINING | {"exit"}]
            return before[-1].get("error") if before else None
        return self.end and self.end["error"]

    @property
    def lost_connection(self) -> bool:
        """True if torch has reported a lost connection. A download may lose its own."""
        if self.error is None or not re.match("RuntimeError|Dist", self.error["type"]):
            return False
        return any(words in self.error["message"] for words in CONNECTION)

    @cached_property
    def waits_in(self) -> dict | None:
        """The call with which a running rank waits for the others, or None: its name and line.

        `number` is that of the collective, or None if the Flight Recorder does not number it.
        """
        if pending := [each for each in self.collectives if not each["done"]]:
            return pending[0]
        calls = [frame for frame in self.stack if frame[0].endswith("/distributed_c10d.py")]
        if calls:
            return {"name": calls[-1][2], "number": None, "line": self.waiting_line}
        for event in self.of("connecting", "connected", "not connected")[-1:]:
            if event["kind"] == "connecting":
                return {"name": "init_process_group", "number": None, "line": event["line"]}
        return None

    @cached_property
    def crash_line(self) -> list | None:
        """The innermost line of the script when the process crashed, or None."""
        known = self.first("libraries")
        for file, line, name in re.findall(r'File "(.+)", line (\d+) in (.+)', self.crash):
            if known and belongs_to_script(file, known["libraries"], known["script_folder"]):
                return [file, int(line), name]
        return None

    def steps(self, optimizer: int = 0) -> list[dict]:
        return [event for event in self.of("step") if event["optimizer"] == optimizer]

    @cached_property
    def training_passes(self) -> dict[int, list[list[dict]]]:
        """Map each loader that is used for training to its passes, each a list of batches.

        A pass is used for training if a backward pass follows one of its batches, or its end,
        before another loader is read, and if an optimizer step uses the gradients. (Accelerate
        reads one batch ahead: the end of the pass comes before the last backward pass.) If a model
        was set to `eval` before the end, the backward pass belongs to the loader read before: the
        script has read a batch, evaluates the model, and then trains it.
        """
        batches: dict[tuple, list[dict]] = {}
        trained: set[tuple] = set()
        waiting: set[tuple] = set()  # passes whose gradients no step has used yet
        before: dict[tuple, tuple | None] = {}  # passes that have not ended -> what was read before
        latest, is_set = None, False
        for event in self.events:
            kind, key = event["kind"], (event.get("loader"), event.get("number"))
            if kind == "pass":
                before[key] = latest
            elif kind == "batch":
                latest = key
                batches.setdefault(key, []).append(event)
            elif kind == "pass end":
                earlier, latest = before.pop(key, None), key
                if is_set:
                    latest = earlier if earlier in before else None
            elif kind == "eval":
                is_set = True
            elif kind == "backward":
                is_set = False
                if latest in batches:
                    waiting.add(latest)
            elif kind == "step":
                trained |= waiting
            if kind in ("step", "thrown"):
                waiting.clear()
        passes: dict[int, list[list[dict]]] = {}
        for loader, number in sorted(trained):
            passes.setdefault(loader, []).append(batches[loader, number])
        return passes

    @cached_property
    def begun_for_training(self) -> list[dict]:
        """The events with which the passes in `training_passes` began."""
        trained = {
            (batches[0]["loader"], batches[0]["number"])
            for passes in self.training_passes.values()
            for batches in passes
        }
        return [each for each in self.of("pass") if (each["loader"], each["number"]) in trained]

    def pass_of(self, loader: int, number: int = 0) -> dict:
        """Return the event with which a pass of a loader began."""
        return next(
            event
            for event in self.of("pass")
            if event["loader"] == loader and event["number"] == number
        )


def batches_of(rank: Rank, loader: int) -> list[dict]:
    """Return the events of the batches that a rank has received from a loader."""
    given = [each for each in rank.of("given") if each["loader"] == loader]
    return given or [each for each in rank.of("batch") if each["loader"] == loader]


def contents(batch: dict) -> list[int]:
    """Return a checksum for each sample of a batch, over all its tensors."""
    columns = batch.get("samples") or [[]]
    length = Counter(map(len, columns)).most_common(1)[0][0]
    rows = zip(*(column for column in columns if len(column) == length), strict=True)
    return [zlib.crc32(repr(row).encode()) for row in rows]


def read_launches(folder: Path, hang: bool = False) -> list[list[Rank]]:
    """Return the ranks of each launch, first those of the launch to audit.

    This is the first one that trains in several processes, or else the first one that trains. If
    training hangs, it is one that has not ended.
    """
    launches: list[list[Rank]] = []
    processes = [_rank_of(events) for events in read_events(str(folder)) if _may_train(events)]
    for rank in sorted(processes, key=lambda rank: rank.events[0]["time"]):
        launch = next((each for each in launches if _belongs_to(rank, each)), None)
        if launch is None:
            launches.append([rank])
        else:
            launch.append(rank)
    for launch in launches:
        launch.sort(key=lambda rank: (rank.number, rank.pid))
        for rank in launch:
            _read_files(rank, folder)

    def order(launch: list[Rank]) -> tuple:
        hangs = hang and any(rank.waits_in for rank in launch if rank.end is None)
        return not hangs, not trains(launch), len(launch) == 1

    return sorted(launches, key=order)


def trains(launch: list[Rank]) -> bool:
    return any(rank.of("backward", "step") for rank in launch)


def _may_train(events: list[dict]) -> bool:
    """Return True for a training process, and if the script failed before it began to train."""
    errors = [event["error"] for event in events if event["kind"] in ("end", "exit")]
    failed = any(
        error and error["places"] and error["type"] not in OF_LAUNCHERS for error in errors
    )
    return failed or bool((OF_TRAINING | {"lost"}) & {event["kind"] for event in events})


def _rank_of(events: list[dict]) -> Rank:
    variables = events[0]["variables"]
    number, world = int(variables.get("RANK", 0)), int(variables.get("WORLD_SIZE", 1))
    for event in events:
        if event["kind"] == "spawned":
            number = event["index"]
        if event["kind"] == "connecting" and (event["world"] or 0) >= world:
            number = event["rank"]
        if event["kind"] == "connected":
            world = max(world, event["world"])
            number = event["rank"] if event["world"] == world else number  # or: only to itself
    return Rank(events[0]["pid"], number, world, events)


def _belongs_to(rank: Rank, launch: list[Rank]) -> bool:
    """Return True if a process was started together with those of a launch.

    They have the same parent, or one of them has started the others and is connected to them. A
    parent may start several launches, one after the other: then the numbers of the ranks repeat.
    """
    first = launch[0]
    if rank.restarts != first.restarts or any(_follows(rank, each) for each in launch):
        return False
    if rank.parent == first.parent:
        return True
    in_one_world = rank.requested_world == first.requested_world > 1
    is_related = rank.parent in {each.pid for each in launch} or rank.pid == first.parent
    return in_one_world and is_related and rank.number not in {each.number for each in launch}


def _follows(rank: Rank, earlier: Rank) -> bool:
    """Return True if a rank began after another one had ended, and replaces it or its launch."""
    has_ended = earlier.events[-1]["time"] <= rank.events[0]["time"]
    has_equal_world = rank.requested_world == earlier.requested_world
    return has_ended and (rank.number == earlier.number or not has_equal_world)


def _read_files(rank: Rank, folder: Path) -> None:
    for event in rank.of("collectives"):
        if len(event["collectives"]) >= len(rank.collectives):
            rank.collectives = event["collectives"]
    crash = folder / f"{rank.pid}.crash"
    rank.crash = crash.read_text(encoding="utf-8", errors="replace") if crash.exists() else ""
    workers = folder / f"{rank.pid}.workers"
    if workers.exists():
        events = read_file(str(workers))
        rank.draws_of_workers = [each for each in events if each["kind"] == "draws"]
        rank.streams_of_workers = [each for each in events if each["kind"] == "stream"]
    answer = folder / f"{rank.pid}.answer"
    if rank.end is None and answer.exists():
        content = json.loads(answer.read_text(encoding="utf-8"))
        rank.collectives, rank.stack = content["collectives"], content["stack"]
        rank.waiting_line = content["line"]
