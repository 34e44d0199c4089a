"""Which rank died first, and how?"""

import re
import signal
from collections.abc import Iterator

from accel_demo.lab.audit.result import ERROR, NOTE, Finding
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.places import last_lines, ranks_in_words
from accel_demo.lab.observed.ranks import Rank

PAGE = "91_then_and_now"  # "Looking for the cause at the end of the output"
KILLED_PAGE = "35_complete_or_absent"  # what SIGKILL is, and what launchers do
ABORT_PAGE = "51_when_it_lies"  # "Taking an abort at the end for a failed check"
# What C++ prints if a gloo thread needs Python's lock (the GIL) while Python exits
ABORT = "terminate called without an active exception"
# What torchrun prints about the first process that failed
OF_TORCHRUN = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)")


def check(evidence: Evidence) -> Iterator[Finding]:
    ranks = [rank for rank in evidence.ranks if rank not in evidence.stopped_by_gloo()]
    own = [rank for rank in ranks if rank.error and not rank.lost_connection]
    own = [rank for rank in own if rank.events[-1]["time"] < _end_of_audit(evidence)]
    if own:
        yield _of_error(evidence, own)
    elif not evidence.hang and len(ranks) == len(evidence.ranks):
        if killed := _killed_first(evidence):
            aborts_at_exit = killed.end and not killed.error and ABORT in evidence.log
            yield (_of_abort if aborts_at_exit else _of_killed)(evidence, killed)


def unexplained(evidence: Evidence, findings: list[Finding]) -> Iterator[Finding]:
    """Report the exit code of a command that failed, unless one of the findings explains it.

    If the audit has ended the training (see --steps), or passes after different numbers of batches
    (see --batches), what follows may fail because of this.
    """
    explained = any(each.check in ("deaths", "collectives", "batches") for each in findings)
    ended_by_audit = any(evidence.counts("enough")) or evidence.is_shortened_unevenly
    if evidence.exit_code in (0, None) or ended_by_audit or evidence.out_of_time or explained:
        return
    yield Finding(
        ERROR,
        "deaths",
        f"The command failed with exit code {evidence.exit_code}. The last lines of its output:"
        + "".join(f"\n      {line}" for line in last_lines(evidence.log)),
        "Repair what these lines report.",
        PAGE,
    )


def _of_error(evidence: Evidence, failed: list[Rank]) -> Finding:
    first = min(failed, key=lambda rank: rank.events[-1]["time"])
    alike = [rank for rank in failed if _kind(rank) == _kind(first)]
    kind, places = _kind(first)
    message = (_error(first)["message"].strip().splitlines() or [""])[0]
    what, cure = f"failed with {kind}: {message}", "Repair this error."
    if kind == "SystemExit":
        what = f"called sys.exit({message if message.isdigit() else repr(message)})"
        if message.isdigit():
            cure = f"Repair what the output reports: {''.join(last_lines(evidence.log)[-1:])}"
    who = ranks_in_words([rank.number for rank in alike], evidence.world).capitalize()
    if evidence.world == 1:
        who = "The script"
    elif others := [rank for rank in evidence.ranks if rank not in alike and _has_failed(rank)]:
        cure += (
            " The other ranks failed only because of this."
            if all(rank.lost_connection or rank.end is None for rank in others)
            else " It happened first. Look whether the errors of the other ranks follow from it."
        )
    if any(each["batches"] != each["whole"] for rank in alike for each in rank.of("pass end")):
        cure += " If the script needs all batches of its loaders, use --batches 0."
    finding = Finding(ERROR, "deaths", f"{who} {what}", cure, PAGE)
    for place in places:
        finding.add_place(place, *(rank.number for rank in alike))
    return finding


def _error(rank: Rank) -> dict:
    assert rank.error
    return rank.error


def _kind(rank: Rank) -> tuple[str, list]:
    """Return the type of an error and its innermost place, if any."""
    return _error(rank)["type"], _error(rank)["places"][-1:]


def _has_failed(rank: Rank) -> bool:
    return rank.end is None or rank.error is not None


def _end_of_audit(evidence: Evidence) -> float:
    """Return the time when the audit began to end the training: later errors may be its own."""
    times = [event["time"] for rank in evidence.ranks for event in rank.of("enough")]
    return min(times, default=float("inf"))


def _killed_first(evidence: Evidence) -> Rank | None:
    """Return the first rank that ended without a Python error, or None if it is unknown."""
    has_lost = any(rank.lost_connection for rank in evidence.ranks)
    has_failed = has_lost or evidence.exit_code not in (0, None)
    if not has_failed or evidence.out_of_time:
        return None
    ranks = [rank for rank in evidence.ranks if not rank.of("enough")]
    named = [rank for rank in ranks if not rank.error and _code_in_log(evidence, rank)]
    killed = [rank for rank in ranks if rank.end is None]
    crashed = [rank for rank in killed if rank.crash]
    if crashed or named:
        return (crashed or named)[0]
    if len(killed) == evidence.world > 1:
        return None
    return min(killed, key=lambda rank: rank.events[-1]["time"], default=None)


def _code_in_log(evidence: Evidence, rank: Rank) -> int | None:
    """Return the exit code of a rank if the launcher has printed that this rank failed first."""
    named = OF_TORCHRUN.search(evidence.log)
    if named and int(named[2]) == rank.pid:
        return int(named[1])
    spawned = re.search(
        rf"process {rank.number} terminated with (?:exit code (\d+)|signal (\w+))", evidence.log
    )
    if spawned:
        return int(spawned[1]) if spawned[1] else -signal.Signals[spawned[2]]
    return None


def _of_killed(evidence: Evidence, rank: Rank) -> Finding:
    code = _code_in_log(evidence, rank)
    cure, page = "If nothing else has killed it, perhaps memory ran out: see `dmesg`.", KILLED_PAGE
    if rank.crash:
        how = rank.crash.splitlines()[0]
        cure = "If gloo received data of an unexpected size, the ranks call different collectives."
    elif code is None or code < 0:
        how = f"killed by {signal.Signals(-code).name}" if code else "killed"
    else:
        how = f"exit code {code}"
        cure, page = "Look for `os._exit` and `SystemExit` in the script.", PAGE
    lines = (event["line"] for event in reversed(rank.events) if event.get("line"))
    return Finding(
        ERROR,
        "deaths",
        f"Rank {rank.number} ended without a Python error after "
        f"{len(rank.of('step'))} optimizer steps ({how}).",
        f"Look at the end of the log. {cure}",
        page,
    ).add_place(rank.crash_line or next(lines, None), rank.number)


def _of_abort(evidence: Evidence, rank: Rank) -> Finding:
    """Describe an abort after the last line of a script. If no rank lost work, it is a note."""
    is_complete = all(each.end and not each.error for each in evidence.ranks)
    rare = (
        "This becomes rare if the script trains in a function `main()` and imports "
        "`torch.distributed.nn.functional` before `init_process_group`."
    )
    return Finding(
        NOTE if is_complete else ERROR,
        "deaths",
        f"Rank {rank.number} aborted after its last line, because a thread of its process group "
        f"was still running ({ABORT}).",
        f"All ranks had ended, so nothing is lost. {rare}" if is_complete else rare,
        ABORT_PAGE,
    )
