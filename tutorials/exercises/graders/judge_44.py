"""Judge the log of exercise 44: find the first event that is a mistake, or what is missing.

nodes_44.py says what the events mean.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from nodes_44 import ENDED, RUNNING, WAITING, Event, Layout

from accel_demo.lab.grading import Wrong

# Headings of page 44
MAIN_PROCESS = "Global or local main process?"
MISTAKES = "Common mistakes"


@dataclass(frozen=True)
class Moment:
    """One event of the log `events`. `index` is its place there."""

    events: list[Event]
    index: int
    layout: Layout

    @property
    def event(self) -> Event:
        return self.events[self.index]

    @property
    def rank(self) -> int:
        return self.event.rank

    @property
    def node(self) -> int:
        return self.layout.place(self.rank)[0]

    def before(self, name: str) -> list[Event]:
        """Return the earlier events with this name, of all ranks."""
        return named(self.events[: self.index], name)

    def before_here(self, name: str) -> list[Event]:
        """Return the earlier events with this name, of the ranks on the same node."""
        return [event for event in self.before(name) if self.is_here(event)]

    def all_here(self, name: str) -> list[Event]:
        """Return all events with this name, earlier or later, of the ranks on the same node."""
        return [event for event in named(self.events, name) if self.is_here(event)]

    def is_here(self, event: Event) -> bool:
        return event.rank in self.layout.ranks_on(self.node)

    def has_called(self, name: str, rank: int) -> bool:
        return any(event.rank == rank for event in self.before(name))


def judge_order(events: list[Event], layout: Layout) -> None:
    """Raise `Wrong` for the first event that is a mistake."""
    for index, event in enumerate(events):
        if event.name in RULES:
            try:
                RULES[event.name](Moment(events, index, layout))
            except Wrong as mistake:
                more = mixed_barriers(events[:index])
                raise Wrong(f"{mistake}{more}", MISTAKES if more else mistake.read) from None


def create_run(now: Moment) -> None:
    if now.before("create run"):
        raise Wrong(
            f"{ranks(named(now.events, 'create run'))} each create a run folder, because they look "
            "for one before another rank's is there",
            MAIN_PROCESS,
        )


def download(now: Moment) -> None:
    if now.has_called("download", now.rank):
        raise Wrong(f"rank {now.rank} downloads twice", MAIN_PROCESS)
    if now.before_here("download"):
        raise Wrong(
            f"{ranks(now.all_here('download'))} each download to node {now.node}'s disk, but only "
            "one rank on each node should",
            MAIN_PROCESS,
        )


def no_data(now: Moment) -> None:
    calls, disk = f"rank {now.rank} calls prepare", f"node {now.node}'s disk"
    if cleaners := now.before_here("clean_up"):
        raise Wrong(f"{calls} after {ranks(cleaners)} has deleted everything on {disk}", MISTAKES)
    if downloaders := now.before_here("download"):
        raise Wrong(
            f"{calls} before {ranks(downloaders)} has downloaded everything to {disk}",
            MAIN_PROCESS,
        )
    if elsewhere := now.before("download"):
        other = now.layout.place(elsewhere[0].rank)[0]
        raise Wrong(
            f"node {now.node} never downloads: {ranks(elsewhere)} has downloaded to node {other}'s "
            f"disk, which rank {now.rank} on node {now.node} cannot read",
            MAIN_PROCESS,
        )
    raise Wrong(f"{calls}, but nobody has downloaded to {disk} yet", MAIN_PROCESS)


def build_cache(now: Moment) -> None:
    if now.before_here("build cache"):
        raise Wrong(
            f"{ranks(now.all_here('build cache'))} each build the cache on node {now.node}'s disk, "
            "because it was not complete when they called prepare",
            MAIN_PROCESS,
        )


def bad_samples(now: Moment) -> None:
    samples = now.event.details["samples"]
    if not now.has_called("prepare", now.rank):
        raise Wrong(
            f"rank {now.rank} never prepares: it calls evaluate with {samples}, because the "
            "samples are in another process's memory",
            MAIN_PROCESS,
        )
    raise Wrong(f"rank {now.rank} calls evaluate with {samples}, which prepare has not returned")


def evaluate(now: Moment) -> None:
    if now.has_called("evaluate", now.rank):
        raise Wrong(f"rank {now.rank} calls evaluate twice")


def save(now: Moment) -> None:
    if now.has_called("save", now.rank):
        raise Wrong(f"rank {now.rank} calls save twice")
    if now.before("save"):
        raise Wrong(
            f"{ranks(named(now.events, 'save'))} each write the checkpoint to the same shared "
            "folder, but only one rank of all should",
            MAIN_PROCESS,
        )


def bad_save(now: Moment) -> None:
    raise Wrong(
        f"rank {now.rank} calls save with {now.event.details['values']}, and not with the run's "
        "folder and the number that evaluate returns"
    )


def clean_up(now: Moment) -> None:
    disk = f"node {now.node}'s disk"
    if now.has_called("clean_up", now.rank):
        raise Wrong(f"rank {now.rank} cleans up {disk} twice")
    if now.before_here("clean_up"):
        raise Wrong(
            f"{ranks(now.all_here('clean_up'))} each clean up {disk}, but only one rank on each "
            "node should",
            MAIN_PROCESS,
        )
    for rank in now.layout.ranks_on(now.node):
        if now.has_called("evaluated", rank):
            continue
        who = "it" if rank == now.rank else f"rank {rank} of the same node"
        is_inside = now.has_called("evaluate", rank)
        when = f"while {who} is still in" if is_inside else f"before {who} has called"
        raise Wrong(f"rank {now.rank} cleans up {disk} {when} evaluate", MISTAKES)


def fail(now: Moment) -> None:
    message = now.event.details["mistake"]
    if "gloo/transport" in message:  # another rank has ended, and the connection to it is lost
        return
    for name in ("open_run", "prepare"):
        is_name_error = re.search("NameError|UnboundLocalError", message)
        if is_name_error and not now.has_called(name, now.rank):
            raise Wrong(f"{message}. Rank {now.rank} has never called {name}", MAIN_PROCESS)
    raise Wrong(message)


RULES: dict[str, Callable[[Moment], None]] = {
    "create run": create_run,
    "download": download,
    "no data": no_data,
    "build cache": build_cache,
    "bad samples": bad_samples,
    "evaluate": evaluate,
    "save": save,
    "bad save": bad_save,
    "clean_up": clean_up,
    "fail": fail,
}


def mixed_barriers(events: list[Event]) -> str:
    """Return a question if two ranks were in different lines at the same barrier, or ""."""
    lines: dict[int, list[int]] = {}  # {rank: line of each of its barriers}
    for event in named(events, "enter"):
        if event.details["collective"] == "barrier":
            lines.setdefault(event.rank, []).append(event.line)
    for number in range(max(map(len, lines.values()), default=0)):
        at = {rank: of[number] for rank, of in sorted(lines.items()) if number < len(of)}
        first, *others = at
        for other in others:
            if at[other] != at[first]:
                return (
                    f". Rank {first} waits at line {at[first]} of your file for rank {other} at "
                    f"line {at[other]}: are these the same barrier?"
                )
    return ""


def judge_end(events: list[Event], layout: Layout) -> None:
    """Raise `Wrong` if something is missing after every rank has returned."""
    for name in ("evaluate", "save"):
        if not named(events, name):
            raise Wrong(f"no rank calls {name}")
    for node in range(len(layout.ranks_per_node)):
        if not any(event.rank in layout.ranks_on(node) for event in named(events, "clean_up")):
            raise Wrong(f"node {node}'s disk is never cleaned up", MAIN_PROCESS)
    for event in named(events, "return"):
        if not event.details["is_right"]:
            raise wrong_return(event, events)
    saved = named(events, "saved")[0]
    for event in named(events[: events.index(saved)], "return"):
        raise Wrong(
            f"rank {event.rank} returns before rank {saved.rank} has written the whole checkpoint",
            MISTAKES,
        )


def wrong_return(event: Event, events: list[Event]) -> Wrong:
    """Return what is wrong with the value that `run` has returned on a rank."""
    called = [other.name for other in events if other.rank == event.rank]
    hint = "" if "open_run" in called else f". Rank {event.rank} has never called open_run"
    return Wrong(
        f"rank {event.rank} returns {event.details['value']} instead of the run's folder and the "
        f"number of correct predictions{hint}",
        MAIN_PROCESS if hint else "",
    )


def stuck(events: list[Event], doing: list[str]) -> Wrong:
    """Return the mistake of ranks that wait for each other forever. `doing` has their states."""
    where = places(events, doing)
    call = "call evaluate" if "in evaluate" in where else "come to the same barriers"
    return Wrong(f"it never ends: {where}. Does every rank {call}?", MISTAKES)


def places(events: list[Event], doing: list[str]) -> str:
    """Return where the ranks are: "rank 0 waits in evaluate (line 9), rank 1 has returned"."""
    by_place: dict[str, list[Event]] = {}
    for rank, state in enumerate(doing):
        *_, before, last = Event(rank, ""), Event(rank, ""), *by_rank(events, rank)
        if state == WAITING:
            call = "evaluate" if before.name == "evaluate" else f"a {last.details['collective']}"
            place = f"waits in {call} (line {last.line})"
        elif state == ENDED:
            place = "has returned"
        elif state == RUNNING and last.line == 0:
            place = "has not called an action yet"
        else:
            place = f"is at or after line {last.line}"
        by_place.setdefault(place, []).append(last)
    plural = {"waits ": "wait ", "has ": "have ", "is ": "are "}
    texts = []
    for place, of in by_place.items():
        for one, several in plural.items() if len(of) > 1 else ():
            place = re.sub(f"^{one}", several, place)
        texts.append(f"{ranks(of)} {place}")
    return ", ".join(texts)


def named(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event.name == name]


def by_rank(events: list[Event], rank: int) -> list[Event]:
    return [event for event in events if event.rank == rank]


def ranks(events: list[Event]) -> str:
    """Return whose events these are: "rank 0" or "ranks 0, 1 and 2"."""
    *numbers, last = (str(number) for number in sorted({event.rank for event in events}))
    return f"ranks {', '.join(numbers)} and {last}" if numbers else f"rank {last}"
