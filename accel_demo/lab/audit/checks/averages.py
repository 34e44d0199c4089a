"""Are averages of the weights (EMA, SWA) equal on all ranks, and updated once per step?"""

from collections.abc import Iterator
from itertools import pairwise

from accel_demo.lab.audit.result import NOTE, WARNING, Finding
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.places import NotChecked

PAGE = "32_batch_statistics"
LEAST = 3  # optimizer steps between whose ends an average is updated equally often


def check(evidence: Evidence) -> Iterator[Finding]:
    evidence.require_data_parallel()
    updates = [rank.of("average") for rank in evidence.ranks]
    if not any(updates):
        raise NotChecked("no torch.optim.swa_utils.AveragedModel was updated")
    numbers = {event["average"] for event in updates[0]}
    for number in sorted(numbers):
        yield from _differences(evidence, number)
        yield from _too_many_updates(evidence, number)


def _differences(evidence: Evidence, number: int) -> Iterator[Finding]:
    """Yield a finding if the ranks' averages differ after as many updates. One rank may have none.

    Buffers differ if the model has a plain BatchNorm, which is only worth a note.
    """
    own = [
        [event for event in rank.of("average") if event["average"] == number]
        for rank in evidence.ranks
    ]
    for events in zip(*own, strict=False):
        if len({event["update"] for event in events}) > 1:
            return
        for what, verdict in (("weights", WARNING), ("buffers", NOTE)):
            if len({event[what] for event in events}) == 1:
                continue
            finding = Finding(
                verdict,
                "averages",
                f"The {what} of the averaged model differ between the ranks after update "
                f"{events[0]['update']}.",
                "Update it on all ranks after the same optimizer steps, from the model inside the "
                "wrapper."
                if what == "weights"
                else "Use SyncBatchNorm, or evaluate and save the average of one rank.",
                PAGE,
            )
            for rank, event in zip(evidence.ranks, events, strict=True):
                finding.add_place(event["line"], rank.number)
            yield finding
            return


def _too_many_updates(evidence: Evidence, number: int) -> Iterator[Finding]:
    """Yield a note if an average is updated several times per optimizer step."""
    rank = evidence.ranks[0]
    events = rank.of("average", "step")
    steps = [place for place, event in enumerate(events) if event["kind"] == "step"]
    counts = [
        sum(event.get("average") == number for event in events[begin:end])
        for begin, end in pairwise(steps)
    ]
    if len(counts) < LEAST or min(counts) < 2:
        return
    finding = Finding(
        NOTE,
        "averages",
        f"The averaged model is updated {counts[0]} times per optimizer step, so it forgets faster "
        "than its decay says.",
        "Update it once per optimizer step, with Accelerate if accelerator.sync_gradients is true.",
        PAGE,
    )
    yield finding.add_places_of(evidence.ranks, "average", average=number)
