"""Judge the log of exercise 44: find the first event that is a mistake, or what is missing.

nodes_44.py explains the events.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from grading import Wrong, list_ranks
from nodes_44 import ENDED, RUNNING, WAITING, Event, Layout

# Headings of page 44
MAIN_PROCESS = "Global or local main process?"
MISTAKES = "Common mistakes"
SAME_BARRIERS = "All ranks must reach the same barriers in the same order"


class TooEarly(Wrong):
    """A rank does something before another rank is ready. The cause may be a barrier."""


@dataclass(frozen=True)
class Moment:
    """One event of the log `events`. `index` is its position in the log."""

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

    @property
    def disk(self) -> str:
        return f"node {self.node}'s disk"

    def before(self, name: str) -> list[Event]:
        """Return the earlier events with this name, of all ranks."""
        return events_named(self.events[: self.index], name)

    def on_node(self, events: list[Event]) -> list[Event]:
        """Return those events that are on the same node."""
        return [event for event in events if event.rank in self.layout.ranks_on(self.node)]

    def has_called(self, name: str, rank: int) -> bool:
        return any(event.rank == rank for event in self.before(name))

    def forbid_second_call(self, does: str, read: str = "") -> None:
        if self.has_called(self.event.name, self.rank):
            raise Wrong(f"rank {self.rank} {does} twice", read)

    def forbid_second_rank_on_node(self, do: str) -> None:
        if self.on_node(self.before(self.event.name)):
            raise Wrong(
                f"{ranks(self.on_node(events_named(self.events, self.event.name)))} each {do} "
                f"{self.disk}, but only one rank on each node should",
                MAIN_PROCESS,
            )


def judge_order(events: list[Event], layout: Layout) -> None:
    """Raise `Wrong` for the first event that is a mistake."""
    for index, event in enumerate(events):
        if event.name in RULES:
            now = Moment(events, index, layout)
            try:
                RULES[event.name](now)
            except TooEarly as mistake:
                raise with_cause(mistake, now) from None


def create_run(now: Moment) -> None:
    if now.before("create run"):
        raise TooEarly(
            f"{ranks(events_named(now.events, 'create run'))} each create a run folder, because "
            "each looked for one before another rank had created it",
            read=MAIN_PROCESS,
        )


def download(now: Moment) -> None:
    now.forbid_second_call("downloads", MAIN_PROCESS)
    now.forbid_second_rank_on_node("download to")


def no_data(now: Moment) -> None:
    calls, disk = f"rank {now.rank} calls prepare", now.disk
    if cleaners := now.on_node(now.before("clean_up")):
        raise Wrong(f"{calls} after {ranks(cleaners)} has deleted everything on {disk}", MISTAKES)
    if downloaders := now.on_node(now.before("download")):
        who = ranks(downloaders)
        raise TooEarly(
            f"{calls} before {who} has downloaded everything to {disk}", read=MAIN_PROCESS
        )
    if elsewhere := now.before("download"):
        other = now.layout.place(elsewhere[0].rank)[0]
        raise Wrong(
            f"node {now.node} never downloads: {ranks(elsewhere)} has downloaded to node {other}'s "
            f"disk, which rank {now.rank} on node {now.node} cannot read",
            MAIN_PROCESS,
        )
    raise Wrong(f"{calls}, but no rank has downloaded to {disk} yet", MAIN_PROCESS)


def build_cache(now: Moment) -> None:
    if now.on_node(now.before("build cache")):
        raise TooEarly(
            f"{ranks(now.on_node(events_named(now.events, 'build cache')))} each build the cache "
            f"on {now.disk}, because it was not complete when they called prepare",
            read=MAIN_PROCESS,
        )


def bad_samples(now: Moment) -> None:
    samples = now.event.details["samples"]
    if not now.has_called("prepare", now.rank):
        raise Wrong(
            f"rank {now.rank} never calls prepare: it calls evaluate with {samples}, because the "
            "samples are in another process's memory",
            MAIN_PROCESS,
        )
    raise Wrong(f"rank {now.rank} calls evaluate with {samples}, which prepare did not return")


def evaluate(now: Moment) -> None:
    now.forbid_second_call("calls evaluate")


def save(now: Moment) -> None:
    now.forbid_second_call("calls save")
    if now.before("save"):
        raise Wrong(
            f"{ranks(events_named(now.events, 'save'))} each write the checkpoint to the same "
            "shared folder, but only one rank should",
            MAIN_PROCESS,
        )


def bad_save(now: Moment) -> None:
    raise Wrong(
        f"rank {now.rank} calls save with {now.event.details['values']} instead of the run's "
        "folder and the number that evaluate returned"
    )


def clean_up(now: Moment) -> None:
    now.forbid_second_call(f"cleans up {now.disk}")
    now.forbid_second_rank_on_node("clean up")
    does = f"rank {now.rank} cleans up {now.disk}"
    if not now.has_called("evaluate", now.rank):
        raise Wrong(
            f"{does} before it has called evaluate, which writes mistakes to that disk",
            MAIN_PROCESS,
        )
    for rank in now.layout.ranks_on(now.node):  # all of them have called evaluate: it's collective
        if not now.has_called("evaluated", rank):
            raise TooEarly(
                f"{does} while rank {rank} on the same node is still in evaluate", read=MISTAKES
            )


def fail(now: Moment) -> None:
    message = now.event.details["mistake"]
    if "gloo/transport" in message:  # another rank has ended, and the connection to it is lost
        return
    for name in ("open_run", "prepare"):
        is_name_error = re.search("NameError|UnboundLocalError", message)
        if is_name_error and not now.has_called(name, now.rank):
            raise Wrong(f"{message}. Rank {now.rank} never called {name}", MAIN_PROCESS)
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


def with_cause(mistake: TooEarly, now: Moment) -> Wrong:
    """Return the mistake, and the mismatched barrier that caused it, if there is one.

    Only the last collective before the mistake can be the cause, because it made this rank wait.
    """
    *_, last = Event(now.rank, ""), *events_of_rank(now.before("enter"), now.rank)
    for barrier in complete_barriers(now.events[: now.index]):
        if not any(event is last for event in barrier):
            continue
        neighbors = now.on_node(barrier)
        neighbors_first = sorted(barrier, key=lambda one: (one not in neighbors, one.rank))
        if pair := mismatch(last, neighbors_first):
            if is_certainly_wrong(pair):
                return Wrong(f"{describe_mismatch(pair)}: {mistake}. {SAME_BARRIERS}", MAIN_PROCESS)
            return Wrong(f"{mistake}. Is this because {describe_mismatch(pair)}?", MAIN_PROCESS)
    return mistake


def complete_barriers(events: list[Event]) -> list[list[Event]]:
    """Return the barriers that all their members have reached, each with one event per member."""
    calls: dict[tuple, dict[int, list[Event]]] = {}  # {group and members: {rank: its barriers}}
    for event in events_named(events, "enter"):
        if event.details["collective"] == "barrier":
            members = event.details["members"]
            key = event.details["group"], *members
            group = calls.setdefault(key, {rank: [] for rank in members})
            group[event.rank].append(event)
    return [
        list(barrier) for group in calls.values() for barrier in zip(*group.values(), strict=False)
    ]


def mismatch(event: Event, barrier: list[Event]) -> tuple[Event, Event] | None:
    """Return the event and the first event at a different place in the learner's file, or None.

    A barrier inside a `with` block counts as being at the place of the block's own barriers. If one
    of the two ranks is entering a block, its event comes second.
    """

    def place(event: Event) -> int:
        return (event.details["blocks"] or [event.line])[0]

    for other in barrier:
        if place(other) != place(event):
            first, second = sorted((event, other), key=lambda one: (is_entry(one), one.rank))
            return first, second
    return None


def is_entry(event: Event) -> bool:
    return event.details["at"] == "entry"


def is_certainly_wrong(pair: tuple[Event, Event]) -> bool:
    """Return True if one of the barriers belongs to a `with` block, so it has its own partner.

    Two calls of wait_for_everyone on different lines may be meant to match.
    """
    return any(event.details["at"] for event in pair)


def describe_mismatch(pair: tuple[Event, Event]) -> str:
    """Return "rank 0's barrier (line 8) was matched with rank 1's (line 9)", and the effect."""
    one, other = pair
    effect = f", so rank {other.rank} entered its `with` block too early" if is_entry(other) else ""
    return (
        f"rank {one.rank}'s barrier (line {one.line}) was matched with rank {other.rank}'s (line "
        f"{other.line}){effect}"
    )


def judge_end(events: list[Event], layout: Layout) -> None:
    """Raise `Wrong` if something is missing after every rank has returned."""
    for name in ("evaluate", "save"):
        if not events_named(events, name):
            raise Wrong(f"no rank calls {name}")
    for node in range(len(layout.ranks_per_node)):
        if not any(
            event.rank in layout.ranks_on(node) for event in events_named(events, "clean_up")
        ):
            raise Wrong(f"node {node}'s disk is never cleaned up", MAIN_PROCESS)
    for event in events_named(events, "return"):
        if not event.details["is_right"]:
            raise wrong_return(event, events)
    saved = events_named(events, "saved")[0]
    for index, event in enumerate(events[: events.index(saved)]):
        if event.name == "return":
            mistake = TooEarly(
                f"rank {event.rank} returns before rank {saved.rank} has written the whole "
                "checkpoint",
                read=MAIN_PROCESS,
            )
            raise with_cause(mistake, Moment(events, index, layout))


def wrong_return(event: Event, events: list[Event]) -> Wrong:
    """Return the mistake in the value that `run` returned on a rank."""
    called = [other.name for other in events if other.rank == event.rank]
    hint = "" if "open_run" in called else f". Rank {event.rank} never called open_run"
    return Wrong(
        f"rank {event.rank} returns {event.details['value']} instead of the run's folder and the "
        f"number of correct predictions{hint}",
        MAIN_PROCESS if hint else "",
    )


def stuck(events: list[Event], rank_states: list[str]) -> Wrong:
    """Return the mistake that makes ranks wait for each other forever."""
    if mistake := waits_inside_block(events, len(rank_states)):
        return mistake
    where = places(events, rank_states)
    pairs = [mismatch(barrier[0], barrier) for barrier in complete_barriers(events)]
    for pair in filter(None, pairs):
        if is_certainly_wrong(pair):
            return Wrong(
                f"{describe_mismatch(pair)}. It hangs: {where}. {SAME_BARRIERS}", MAIN_PROCESS
            )
    last = [
        events_of_rank(events, rank)[-1]
        for rank, state in enumerate(rank_states)
        if state == WAITING
    ]
    in_evaluate = [event.line for event in last if is_in_evaluate(events, event.rank)]
    elsewhere = [event.line for event in last if not is_in_evaluate(events, event.rank)]
    # A rank that waits in an earlier line may still call evaluate.
    is_left_out = in_evaluate and not (elsewhere and min(elsewhere) < min(in_evaluate))
    call = "call evaluate" if is_left_out else "reach the same barriers"
    return Wrong(f"it hangs: {where}. Does every rank {call}?", MISTAKES)


def waits_inside_block(events: list[Event], world_size: int) -> Wrong | None:
    """Return the mistake if ranks in a `with` block wait for ranks that can't enter it."""
    last = [events_of_rank(events, rank)[-1:] for rank in range(world_size)]
    waiting = events_named(sum(last, []), "enter")
    for line in [event.line for event in waiting if is_entry(event)]:
        outside = [event for event in waiting if is_entry(event) and event.line == line]
        inside = [
            event
            for event in waiting
            if line in event.details["blocks"] and not event.details["at"]
        ]
        if inside:
            is_evaluate = is_in_evaluate(events, inside[0].rank)
            call = "evaluate's all-reduce" if is_evaluate else "a collective"
            return Wrong(
                f"it hangs: {ranks(inside)} {verb(inside, 'waits', 'wait')} in {call} (line "
                f"{inside[0].line}) for {ranks(outside)}, which can't enter the `with` block on "
                f"line {line} before {ranks(inside)} {verb(inside, 'leaves', 'leave')} it. Don't "
                f"call {'evaluate' if is_evaluate else call} inside the block",
                MAIN_PROCESS,
            )
    return None


def is_in_evaluate(events: list[Event], rank: int) -> bool:
    """Return True if the last collective of the rank is that of evaluate."""
    return [event.name for event in events_of_rank(events, rank)[-2:]] == ["evaluate", "enter"]


def remark(events: list[Event]) -> str:
    """Return a remark on a right answer that calls a barrier inside a `with` block, or ""."""
    for barrier in complete_barriers(events):
        inside = [event for event in barrier if event.details["blocks"]]
        of_block = [event for event in barrier if event.details["at"] and event not in inside]
        if inside and of_block:
            return (
                f". But the barrier on line {inside[0].line} works only because it happens to "
                f"match the barrier of the `with` block on line {of_block[0].line}. Call it after "
                "the block"
            )
    return ""


def places(events: list[Event], rank_states: list[str]) -> str:
    """Return where the ranks are: "rank 0 waits in evaluate (line 9), rank 1 has returned"."""
    by_place: dict[tuple[str, str], list[Event]] = {}
    for rank, state in enumerate(rank_states):
        last = [Event(rank, ""), *events_of_rank(events, rank)][-1]
        if state == WAITING:
            is_barrier = last.details["collective"] == "barrier"
            call = "a barrier" if is_barrier else "a collective"
            call = "evaluate" if is_in_evaluate(events, rank) else call
            place = "waits wait", f"in {call} (line {last.line})"
        elif state == ENDED:
            place = "has have", "returned"
        elif state == RUNNING and last.line == 0:
            place = "has have", "not called an action yet"
        else:
            place = "is are", f"at or after line {last.line}"
        by_place.setdefault(place, []).append(last)
    return ", ".join(
        f"{ranks(of)} {verb(of, *verbs.split())} {place}" for (verbs, place), of in by_place.items()
    )


def verb(events: list[Event], one: str, several: str) -> str:
    """Return the form of a verb whose subject is `ranks(events)`."""
    return several if len({event.rank for event in events}) > 1 else one


def events_named(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event.name == name]


def events_of_rank(events: list[Event], rank: int) -> list[Event]:
    return [event for event in events if event.rank == rank]


def ranks(events: list[Event]) -> str:
    """Return whose events these are: "rank 0" or "ranks 0, 1 and 2"."""
    return list_ranks({event.rank for event in events})
