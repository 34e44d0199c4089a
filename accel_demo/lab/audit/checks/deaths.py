"""Which rank died first, and how?"""

from collections.abc import Iterator

from accel_demo.lab.audit.evidence import Evidence
from accel_demo.lab.audit.result import ERROR, Finding

PAGE = "20_collectives"
CONNECTION = ("Connection closed", "Connection reset", "Broken pipe", "pair closure", "imed out")


def check(evidence: Evidence) -> Iterator[Finding]:
    ranks = [rank for rank in evidence.ranks if rank not in evidence.stopped_by_gloo()]
    errors = [(rank, rank.error, rank.events[-1]["time"]) for rank in ranks if rank.error]
    own = [each for each in errors if not any(word in each[1]["message"] for word in CONNECTION)]
    if own:
        first, error, _ = min(own, key=lambda each: each[2])
        message = error["message"].strip().splitlines() or [""]
        finding = Finding(
            ERROR,
            "deaths",
            f"Rank {first.number} failed first, with {error['type']}: {message[0]}",
            "Repair this error. The errors of the other ranks follow from it.",
            PAGE,
        )
        if error["places"]:
            finding.add_place(error["places"][-1], first.number)
        yield finding
    elif not evidence.hang and evidence.exit_code not in (0, None):
        killed = [rank for rank in ranks if rank.end is None]
        if len(ranks) == len(evidence.ranks) and killed and len(killed) < len(evidence.ranks):
            first = min(killed, key=lambda rank: rank.events[-1]["time"])
            crashed = [rank for rank in killed if rank.crash]
            first = crashed[0] if crashed else first
            how = first.crash.splitlines()[0] if crashed else "killed"
            yield Finding(
                ERROR,
                "deaths",
                f"Rank {first.number} ended without a Python error after "
                f"{len(first.of('step'))} optimizer steps ({how}).",
                "Look at the end of the log. If it was killed, perhaps memory ran out. If gloo "
                "received data of an unexpected size, the ranks call different collectives.",
                PAGE,
            ).add_place(first.crash_line or first.events[-1].get("line"), first.number)
