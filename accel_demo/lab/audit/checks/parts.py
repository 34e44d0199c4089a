"""Is the data set divided into as many parts as there are processes?"""

import math
from collections.abc import Iterator

from accel_demo.lab.audit.result import ERROR, WARNING, Finding
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.places import NotChecked

PAGE = "30_who_saw_which_sample"


def check(evidence: Evidence) -> Iterator[Finding]:
    evidence.require_connected()
    world = evidence.ranks[0].connected_world
    begins = [(rank, each) for rank in evidence.ranks for each in rank.of("pass")]
    divisions: dict[str, list] = {}
    for rank, begin in begins:
        if divided := begin["divided_by"]:
            key = str((begin["samples"], [(name, parts) for name, parts, _ in divided]))
            divisions.setdefault(key, []).append((rank, begin))
    if not divisions:
        raise NotChecked("no sampler divides the samples between the ranks")
    for passes in divisions.values():
        divided = passes[0][1]["divided_by"]
        parts = math.prod(part for _, part, _ in divided)
        read = {str([own for _, _, own in begin["divided_by"]]) for _, begin in passes}
        if parts <= world or len(read) >= parts:
            continue
        names = [name for name, part, _ in divided if part > 1]
        if len(names) > 1:
            why = f"{' and '.join(names)} both divide it"
            cure = "Give accelerator.prepare a loader without a DistributedSampler, or don't "
            cure += "pass this loader to it."
        else:
            why = f"{names[0]} was created for {parts} processes"
            cure = "Let DistributedSampler take num_replicas and rank from the process group."
        finding = Finding(
            ERROR if len(names) > 1 else WARNING,  # later passes may read the other parts
            "parts",
            f"The data set is divided into {parts} parts for {world} processes, which "
            f"did not read all of them: {why}.",
            cure,
            PAGE,
        )
        for rank, begin in passes:
            finding.add_place(begin["line"], rank.number)
        yield finding
