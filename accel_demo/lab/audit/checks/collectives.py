"""Do all ranks call the same collectives, and does none of them leave while the others wait?"""

from collections.abc import Iterator

from accel_demo.lab.audit.result import ERROR, Finding
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.places import NotChecked, ranks_in_words, text_of
from accel_demo.lab.observed.ranks import Rank

PAGE = "50_when_it_hangs"
CURE = (
    "Every rank has to call the same collectives in the same order: take them out of branches that "
    "only some ranks run, and let all ranks end their loops at the same step."
)

CONNECT_PAGE = "10_where_am_i"
CONNECT = (
    "Start as many processes as the world size that they ask for, each with a rank of its own, and "
    "all with the same address and port."
)


def check(evidence: Evidence) -> Iterator[Finding]:
    if not evidence.is_distributed and not evidence.hang:
        raise NotChecked("the ranks were not connected")
    groups = {each["group"] for rank in evidence.ranks for each in rank.collectives}
    if not groups and not evidence.hang:
        raise NotChecked("the Flight Recorder saw no collective")
    for group in sorted(groups):
        if finding := _first_difference(evidence, group):
            yield finding
            return
    if stopped := evidence.stopped_by_gloo():
        finding = Finding(
            ERROR,
            "collectives",
            f"The ranks call different collectives: {ranks_in_words([stopped[0].number], 0)} "
            "received data of a size that it did not expect.",
            CURE,
            PAGE,
        )
        for rank in stopped:
            finding.add_place(rank.crash_line or _line_of_error(rank), rank.number)
        yield finding
    elif finding := _who_left(evidence):
        if evidence.is_shortened_unevenly:
            raise NotChecked("passes ended after different numbers of batches (see --batches)")
        yield finding


def _line_of_error(rank: Rank) -> list | None:
    places = rank.error["places"] if rank.error else []
    return places[-1] if places else None


def _calls(rank: Rank, group: str) -> dict[int, dict]:
    """Map the number of each recorded collective of a group to the collective."""
    return {
        each["number"]: each
        for each in rank.collectives
        if each["group"] == group and not each["is_p2p"]
    }


def _first_difference(evidence: Evidence, group: str) -> Finding | None:
    calls = {rank.number: _calls(rank, group) for rank in evidence.ranks}
    calls = {number: each for number, each in calls.items() if each}
    if len(calls) < 2:
        return None
    common = set.intersection(*(set(each) for each in calls.values()))
    for number in sorted(common):
        kinds = {rank: _kind(each[number]) for rank, each in calls.items()}
        if len(set(kinds.values())) > 1:
            texts = ", ".join(
                f"rank {rank} calls {_in_words(calls[rank][number])}" for rank in calls
            )
            finding = Finding(
                ERROR,
                "collectives",
                f"The ranks call different collectives: in collective {number}, {texts}.",
                CURE,
                PAGE,
            )
        else:
            lines = {rank: tuple(each[number]["line"] or []) for rank, each in calls.items()}
            if len(set(lines.values())) == 1 or not _crossed(calls, number):
                continue
            texts = ", ".join(
                f"rank {rank} calls {calls[rank][number]['name']} in line {line[1]}"
                for rank, line in lines.items()
                if line
            )
            finding = Finding(
                ERROR,
                "collectives",
                f"The ranks call equal collectives from different lines, so unrelated tensors are "
                f"combined: in collective {number}, {texts}.",
                CURE,
                PAGE,
            )
        for rank, each in calls.items():
            finding.add_place(each[number]["line"], rank)
        return finding
    return None


def _kind(call: dict) -> tuple:
    """Return what has to be equal on all ranks. Only the root has the input of a scatter."""
    if call["name"] in ("all_reduce", "broadcast", "reduce"):
        return call["name"], str(call["sizes"]), str(call["types"])
    return (call["name"],)


def _crossed(calls: dict[int, dict[int, dict]], number: int) -> bool:
    """Return True if two ranks call the same two statements in opposite order.

    Different lines alone may be right: `if rank == 0: broadcast(a) else: broadcast(b)`.
    """
    ranks = list(calls)
    texts = [
        [_text(calls[rank].get(each)) for each in (number, number + 1)]
        for rank in (ranks[0], ranks[-1])
    ]
    return texts[0] == texts[1][::-1] and texts[0] != texts[1] and None not in texts[0]


def _text(call: dict | None) -> str | None:
    """Return the statement that called a collective, or None if it is unknown."""
    return text_of(call["line"][:2]) if call and call["line"] else None


def _in_words(call: dict) -> str:
    sizes = " and ".join("x".join(map(str, size)) or "a scalar" for size in call["sizes"])
    return f"{call['name']} of {sizes}" if sizes else call["name"]


def _who_left(evidence: Evidence) -> Finding | None:
    """Report that ranks wait in a collective, and which rank has left."""
    left = [rank for rank in evidence.ranks if _left(rank)]
    waiting = {rank: rank.waits_in for rank in evidence.ranks if rank.end is None and rank.waits_in}
    failed = {
        rank: rank.collectives[-1]
        for rank in evidence.ranks
        if rank.lost_connection and rank.collectives
    }
    calls = waiting | failed
    if not calls or not (left or evidence.hang):
        return None
    what = " and ".join(sorted({_numbered(call) for call in calls.values()}))
    who = ranks_in_words([rank.number for rank in calls], len(evidence.ranks))
    sentence = f"{who} {'waits' if len(calls) == 1 else 'wait'} in {what}"
    if left:
        gone = ranks_in_words([rank.number for rank in left], len(evidence.ranks))
        reached = max(_last_number(rank) for rank in left)
        sentence += f" for {gone}, which left after collective {reached}"
    else:
        sentence = f"training hangs: {sentence}"
    sentence = f"{sentence[0].upper()}{sentence[1:]}."
    if {call["name"] for call in calls.values()} == {"init_process_group"}:
        finding = Finding(ERROR, "collectives", sentence, CONNECT, CONNECT_PAGE)
    else:
        finding = Finding(ERROR, "collectives", sentence, CURE, PAGE)
    for rank, call in calls.items():
        finding.add_place(call["line"], rank.number)
    return finding


def _numbered(call: dict) -> str:
    number = "" if call["number"] is None else f" (collective {call['number']})"
    return f"{call['name']}{number}"


def _left(rank: Rank) -> bool:
    """Return True if the script has ended on this rank, and not the audit (see --steps)."""
    return rank.end is not None and rank.error is None and not rank.of("enough")


def _last_number(rank: Rank) -> int:
    return max([each["number"] for each in rank.collectives if not each["is_p2p"]], default=0)
