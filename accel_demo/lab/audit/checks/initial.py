"""Do all ranks start with the same weights?"""

from collections.abc import Iterator

from accel_demo.lab.audit.result import ERROR, Finding
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.places import NotChecked

PAGE = "22_ddp"


def check(evidence: Evidence) -> Iterator[Finding]:
    evidence.require_data_parallel()
    sums = [
        tuple(event["sums"])
        for optimizers in evidence.optimizers[:1]
        for rank, optimizer in zip(evidence.ranks, optimizers, strict=True)
        for event in rank.of("weights")
        if event["optimizer"] == optimizer and event["sums"]
    ]
    if len(sums) < 2:
        raise NotChecked("no optimizer step, or the parameters are shards")
    if len(set(sums)) == 1:
        return
    wrapped = [rank.first("wrapped") for rank in evidence.ranks]
    totals = {event["total"] if event else None for event in wrapped}
    if len(totals) == 1 and None not in totals:
        finding = Finding(
            ERROR,
            "initial",
            "The ranks start with different weights: they were equal when DistributedDataParallel "
            "wrapped the model, and have changed since.",
            "Initialize or load the weights before the model is wrapped.",
            PAGE,
        )
    else:
        finding = Finding(
            ERROR,
            "initial",
            "The ranks start with different weights. Averaged gradients never make them equal.",
            "Wrap the model in DistributedDataParallel, which copies rank 0's weights to all "
            "ranks, or seed all ranks equally before the model is created.",
            PAGE,
        )
    for rank in evidence.ranks:
        for kind in ("wrapped", "optimizer", "step"):
            for event in rank.of(kind)[:1]:
                finding.add_place(event["line"], rank.number)
    finding.places.sort(key=lambda place: (place.file, place.line))
    yield finding
