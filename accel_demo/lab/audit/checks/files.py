"""Do two ranks write the same file, or does one read it while another writes it?"""

import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import permutations
from linecache import getlines

from accel_demo.lab.audit.result import ERROR, NOTE, WARNING, Finding
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.places import NotChecked, short_path

PAGE = "35_complete_or_absent"
WRITES = ("write", "save", "rename")
ONE_WRITER = (
    "Let only the main process write it (if accelerator.is_main_process, or if rank == 0), or give "
    "each rank a file of its own."
)
POLLING = re.compile(r"\bwhile\b.*\b(exists|is_file|isfile)\(")
WAIT = "Put a barrier, such as accelerator.wait_for_everyone(), after the write."


def check(evidence: Evidence) -> Iterator[Finding]:
    if len(evidence.ranks) < 2:
        raise NotChecked("there was one process")
    evidence.require_connected()
    by_path = defaultdict(lambda: defaultdict(list))
    for rank in evidence.ranks:
        for event in rank.of("file"):
            by_path[event["path"]][rank.number].append(event)
    if not by_path:
        raise NotChecked("the script opened no files")
    for path, ranks in sorted(by_path.items()):
        writers = {n: [e for e in events if e["how"] in WRITES] for n, events in ranks.items()}
        writers = {number: events for number, events in writers.items() if events}
        appending = _appending_at_once(ranks)
        first = {number: events[0] for number, events in writers.items()}
        name, many = short_path(path), f"{len(writers)} ranks"
        only_renamed = {e["how"] for events in writers.values() for e in events} == {"rename"}
        if len(writers) > 1 and only_renamed:
            what = f"{many} rename a file to {name}. The last one wins."
            yield _of_writers(NOTE, what, first)
        elif len(writers) > 1:
            what = f"{many} write {name}. The last one wins, and a reader may see a mixture."
            yield _of_writers(ERROR, what, first)
        elif appending and path not in evidence.unwritten:  # at least one rank has written to it
            what = f"{len(appending)} ranks append to {name}: their lines are mixed."
            yield _of_writers(WARNING, what, appending)
        elif finding := _read_while_written(path, ranks) or _read_too_early(path, ranks, evidence):
            yield finding


def _of_writers(verdict: str, sentence: str, events: dict[int, dict]) -> Finding:
    """Return a finding about the ranks in `events`, which maps them to their first write."""
    finding = Finding(verdict, "files", sentence, ONE_WRITER, PAGE)
    for number, event in events.items():
        finding.add_place(event["line"], number)
    return finding


def _appending_at_once(ranks: dict[int, list[dict]]) -> dict[int, dict]:
    """Return the ranks that append without waiting for another one that does, and the events.

    Ranks that append in turn call a collective, such as a barrier, in between.
    """
    by_time = defaultdict(dict)
    for number, events in ranks.items():
        for event in events:
            if event["how"] == "append" and event["collectives"] is not None:
                by_time[tuple(event["collectives"])].setdefault(number, event)
    return max(by_time.values(), key=len) if max(map(len, by_time.values()), default=0) > 1 else {}


def _read_while_written(path: str, ranks: dict[int, list[dict]]) -> Finding | None:
    for writer, begun, ended in _saves(ranks):
        for reader, events in ranks.items():
            reads = [event for event in events if event["how"] == "read" and reader != writer]
            inside = [event for event in reads if begun["time"] < event["time"] < ended["time"]]
            if inside:
                finding = Finding(
                    ERROR,
                    "files",
                    f"Rank {reader} reads {short_path(path)} while rank {writer} is writing it.",
                    WAIT,
                    PAGE,
                )
                finding.add_place(begun["line"], writer)
                finding.add_place(inside[0]["line"], reader)
                return finding
    return None


def _read_too_early(path: str, ranks: dict[int, list[dict]], evidence: Evidence) -> Finding | None:
    """Report a file that a rank has read after another one wrote it, without waiting for it.

    Ranks wait for each other in collectives. They may also use locks, send messages, or wait until
    a file exists: then nothing is known.
    """
    if any(evidence.counts("lock")) or evidence.has_messages:
        return None
    for writer, reader in permutations(ranks, 2):
        for write in [event for event in ranks[writer] if event["how"] in WRITES]:
            for read in [event for event in ranks[reader] if event["how"] == "read"]:
                is_later = read["time"] > write["time"]
                waited = None in (read["collectives"], write["collectives"]) or (
                    read["collectives"] != write["collectives"]
                )
                if is_later and not waited and not _polls(read):
                    finding = Finding(
                        WARNING,
                        "files",
                        f"Rank {reader} reads {short_path(path)} without waiting for rank "
                        f"{writer}, which writes it: this works only if rank {writer} is faster.",
                        WAIT,
                        PAGE,
                    )
                    finding.add_place(write["line"], writer)
                    return finding.add_place(read["line"], reader)
    return None


def _polls(event: dict) -> bool:
    """Return True if the file of the line of an event has a loop that waits for a file to exist."""
    return bool(event["line"]) and any(map(POLLING.search, getlines(event["line"][0])))


def _saves(ranks: dict[int, list[dict]]) -> Iterator[tuple[int, dict, dict]]:
    """Yield the rank, the begin and the end of each save."""
    for rank, events in ranks.items():
        begun = [event for event in events if event["how"] == "save"]
        ended = [event for event in events if event["how"] == "saved"]
        for number, first in enumerate(begun):
            never = {"time": float("inf")}  # the process was killed while it wrote
            yield rank, first, ended[number] if number < len(ended) else never
