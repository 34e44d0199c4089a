"""Read the events that the observer has written: one `Rank` per training process of a launch."""

import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from accel_demo.lab.audit.result import NotChecked, ranks_in_words
from accel_demo.observer.events import belongs_to_script, read_events

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
# Part of gloo's message: "Received data size doesn't match expected size. Is there a distributed
# collective mismatch in your code?"
MISMATCH = "collective mismatch"


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
        reads one batch ahead: the end of the pass comes before the last backward pass.)
        """
        batches: dict[tuple[int, int], list[dict]] = {}
        trained: set[tuple[int, int]] = set()
        waiting: set[tuple[int, int]] = set()  # passes whose gradients no step has used yet
        latest = None
        for event in self.events:
            if event["kind"] in ("batch", "pass end"):
                latest = event["loader"], event["number"]
            if event["kind"] == "batch":
                batches.setdefault((event["loader"], event["number"]), []).append(event)
            elif event["kind"] == "backward" and latest in batches:
                waiting.add(latest)
            elif event["kind"] == "step":
                trained |= waiting
            if event["kind"] in ("step", "thrown"):
                waiting.clear()
        passes: dict[int, list[list[dict]]] = {}
        for loader, number in sorted(trained):
            passes.setdefault(loader, []).append(batches[loader, number])
        return passes

    def pass_of(self, loader: int, number: int = 0) -> dict:
        """Return the event with which a pass of a loader began."""
        return next(
            event
            for event in self.of("pass")
            if event["loader"] == loader and event["number"] == number
        )


@dataclass
class Evidence:
    """All that an audit has seen. `hang` is set if the training hung and was killed.

    `log` is the end of what the command has printed.
    """

    ranks: list[Rank]
    exit_code: int | None
    log: str = ""
    hang: bool = False
    out_of_time: bool = False
    seconds_to_notice: float = 0.0  # from the last event to the moment when the hang was noticed
    other_launches: list[list[Rank]] = field(default_factory=list)

    def __post_init__(self):
        if self.exit_code == 0:  # so the script has caught what `sys.exit` raises
            for rank in self.ranks:
                rank.events = [event for event in rank.events if event["kind"] != "exit"]

    @property
    def world(self) -> int:
        """Number of processes that were started."""
        return max([rank.world for rank in self.ranks] + [len(self.ranks)])

    @property
    def clones(self) -> list[Rank]:
        """The ranks whose `Accelerator()` trains alone, although several processes were started."""
        first = [(rank, rank.first("accelerator")) for rank in self.ranks]
        return [rank for rank, event in first if event and event["processes"] < self.world]

    def stopped_by_gloo(self) -> list[Rank]:
        """Return the ranks that gloo has stopped because they received data of a wrong size.

        It raises an error, or ends the process and prints the message.
        """
        return [
            rank
            for rank in self.ranks
            if (rank.error and MISMATCH in rank.error["message"])
            or (rank.crash and rank.error is None and MISMATCH in self.log)
        ]

    @property
    def is_distributed(self) -> bool:
        return any(rank.connected_world > 1 for rank in self.ranks) and not self.clones

    @property
    def has_messages(self) -> bool:
        """True if a rank has sent or received a message to or from a single other rank."""
        return any(each["is_p2p"] for rank in self.ranks for each in rank.collectives)

    def require_all_events(self) -> None:
        """Raise `NotChecked` if not all events of the ranks could be written and read."""
        if lost := [rank.number for rank in self.ranks if rank.of("lost")]:
            who = ranks_in_words(lost, len(self.ranks))
            raise NotChecked(f"events of {who} were lost (is a disk full?)")
        if any(rank.of("lost") for launch in self.other_launches for rank in launch):
            raise NotChecked("events of a process were lost (is a disk full?)")

    def require_connected(self) -> None:
        """Raise `NotChecked` unless the ranks were connected."""
        if not self.is_distributed:
            raise NotChecked("the ranks were not connected")

    def require_data_parallel(self) -> None:
        """Raise `NotChecked` unless the ranks were connected, and all train the same parameters."""
        self.require_connected()
        wrapped = [(rank, event) for rank in self.ranks for event in rank.of("wrapped")]
        if any(event["ranks"] < rank.connected_world for rank, event in wrapped):
            raise NotChecked("a model is trained by a part of the ranks")
        if any(self.counts("tensor parallel")):
            raise NotChecked("tensors are divided between the ranks: this is not data-parallel")
        starts = [rank.first("weights") for rank in self.ranks]
        if len({str(each["shapes"]) for each in starts if each}) > 1:
            raise NotChecked("each rank trains other parameters: this is not data-parallel")

    @property
    def joins(self) -> bool:
        """True if training ran inside torch.distributed.algorithms.join.Join, as in DDP.join()."""
        return any(self.counts("join"))

    def counts(self, kind: str) -> list[int]:
        return [len(rank.of(kind)) for rank in self.ranks]


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
    """Return True if a rank has replaced one that had ended, or is one of a different number."""
    has_ended = earlier.events[-1]["time"] <= rank.events[0]["time"]
    has_equal_world = rank.requested_world == earlier.requested_world
    return has_ended and (rank.number == earlier.number or not has_equal_world)


def _read_files(rank: Rank, folder: Path) -> None:
    for event in rank.of("collectives"):
        if len(event["collectives"]) >= len(rank.collectives):
            rank.collectives = event["collectives"]
    crash = folder / f"{rank.pid}.crash"
    rank.crash = crash.read_text(errors="replace") if crash.exists() else ""
    answer = folder / f"{rank.pid}.answer"
    if rank.end is None and answer.exists():
        content = json.loads(answer.read_text())
        rank.collectives, rank.stack = content["collectives"], content["stack"]
        rank.waiting_line = content["line"]
