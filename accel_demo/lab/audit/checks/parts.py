"""Is the data set divided into as many parts as there are processes?"""

import math
from collections.abc import Iterator

from accel_demo.lab.audit.evidence import Evidence
from accel_demo.lab.audit.result import ERROR, Finding, NotChecked

PAGE = "30_who_saw_which_sample"


def check(evidence: Evidence) -> Iterator[Finding]:
    evidence.require_connected()
    first = evidence.ranks[0]
    world = first.connected_world
    begins = [each for each in first.of("pass") if each["divided_by"]]
    if not begins:
        raise NotChecked("no sampler divides the samples between the ranks")
    for begin in {str(each["line"]): each for each in begins}.values():
        parts = math.prod(part for _, part in begin["divided_by"])
        if parts <= world:
            continue
        names = [name for name, part in begin["divided_by"] if part > 1]
        if len(names) > 1:
            why = f"{' and '.join(names)} both divide it"
            cure = "Give accelerator.prepare a loader without a DistributedSampler, or don't "
            cure += "pass this loader to it."
        else:
            why = f"{names[0]} was created for {parts} processes"
            cure = "Let DistributedSampler take num_replicas and rank from the process group."
        finding = Finding(
            ERROR,
            "parts",
            f"The data set is divided into {parts} parts for {world} processes, so "
            f"{parts - world} parts are never read: {why}.",
            cure,
            PAGE,
        )
        for rank in evidence.ranks:
            finding.add_place(begin["line"], rank.number)
        yield finding
