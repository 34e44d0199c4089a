"""Which rank died first, and how?"""

import re
import signal
from collections.abc import Iterator

from accel_demo.lab.audit.evidence import Evidence, Rank
from accel_demo.lab.audit.result import ERROR, Finding, ranks_in_words

PAGE = "91_then_and_now"  # "Looking for the cause at the end of the output"
KILLED_PAGE = "35_complete_or_absent"  # what SIGKILL is, and what launchers do
CONNECTION = ("Connection closed", "Connection reset", "Broken pipe", "pair closure", "imed out")
# What torchrun prints about the first process that failed
OF_TORCHRUN = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)")
FROM_TORCHRUN = re.compile(r"^.*(?:failed \(exitcode|closing signal)", re.MULTILINE)
LINES = 5  # of the log, in a finding


def check(evidence: Evidence) -> Iterator[Finding]:
    ranks = [rank for rank in evidence.ranks if rank not in evidence.stopped_by_gloo()]
    own = [rank for rank in ranks if rank.error and not _lost_connection(rank)]
    if own:
        yield _of_error(evidence, own)
    elif not evidence.hang and len(ranks) == len(evidence.ranks):
        if killed := _killed_first(evidence):
            yield _of_killed(evidence, killed)


def unexplained(evidence: Evidence, findings: list[Finding]) -> Iterator[Finding]:
    """Report the exit code of a command that failed, unless one of the findings explains it.

    If the audit has ended the training (see --steps), what follows may fail because of this.
    """
    explained = any(each.check in ("deaths", "collectives", "batches") for each in findings)
    ended_by_audit = evidence.exit_code is None or any(evidence.counts("enough"))
    if evidence.exit_code == 0 or ended_by_audit or evidence.out_of_time or explained:
        return
    of_ranks = FROM_TORCHRUN.split(evidence.log, maxsplit=1)[0]
    lines = [line[:200] for line in (of_ranks.strip() or evidence.log).splitlines() if line.strip()]
    yield Finding(
        ERROR,
        "deaths",
        f"The command failed with exit code {evidence.exit_code}. The last lines of its output:"
        + "".join(f"\n      {line}" for line in lines[-LINES:]),
        "Repair what these lines report.",
        PAGE,
    )


def _lost_connection(rank: Rank) -> bool:
    """Return True if torch has reported a lost connection. A download may lose its own."""
    if rank.error is None or not re.match("RuntimeError|Dist", rank.error["type"]):
        return False
    return any(word in rank.error["message"] for word in CONNECTION)


def _of_error(evidence: Evidence, failed: list[Rank]) -> Finding:
    first = min(failed, key=lambda rank: rank.events[-1]["time"])
    alike = [rank for rank in failed if _kind(rank) == _kind(first)]
    message = first.error["message"].strip().splitlines() or [""]
    if first.error["type"] == "SystemExit":
        what = f"called sys.exit({message[0] if message[0].isdigit() else repr(message[0])})"
    else:
        what = f"failed with {first.error['type']}: {message[0]}"
    if evidence.world == 1:
        who, cure = "The script", ""
    elif len(alike) == evidence.world:
        who, cure = "All ranks", ""
    else:
        who = ranks_in_words([rank.number for rank in alike], evidence.world).capitalize()
        others = [rank for rank in evidence.ranks if rank not in alike and _has_failed(rank)]
        cure = " The other ranks failed later: look whether this follows." if others else ""
        if others and all(_lost_connection(rank) or rank.end is None for rank in others):
            cure = " The other ranks failed only because this one had ended."
    finding = Finding(ERROR, "deaths", f"{who} {what}", f"Repair this error.{cure}", PAGE)
    for rank in alike:
        if rank.error["places"]:
            finding.add_place(rank.error["places"][-1], rank.number)
    return finding


def _kind(rank: Rank) -> tuple:
    return rank.error["type"], str(rank.error["places"][-1:])


def _has_failed(rank: Rank) -> bool:
    return rank.end is None or rank.error is not None


def _killed_first(evidence: Evidence) -> Rank | None:
    """Return the first rank that ended without a Python error, or None if it is unknown."""
    has_failed = evidence.exit_code not in (0, None) or any(map(_lost_connection, evidence.ranks))
    if not has_failed or evidence.out_of_time:
        return None
    named = [each for each in evidence.ranks if not each.error and _code_in_log(evidence, each)]
    killed = [rank for rank in evidence.ranks if rank.end is None]
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
    if rank.crash:
        how = rank.crash.splitlines()[0]
    elif code is None:
        how = "killed"
    else:
        how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
    cure = "Look at the end of the log. "
    if code == -signal.SIGKILL or (code is None and not rank.crash):
        cure += "If nothing else has killed it, perhaps memory ran out: see `dmesg`."
    elif rank.crash:
        cure += "If gloo received data of an unexpected size, the ranks call different collectives."
    return Finding(
        ERROR,
        "deaths",
        f"Rank {rank.number} ended without a Python error after "
        f"{len(rank.of('step'))} optimizer steps ({how}).",
        cure.strip(),
        KILLED_PAGE,
    ).add_place(rank.crash_line or rank.events[-1].get("line"), rank.number)
