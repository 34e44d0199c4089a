"""Are gradients set to zero before a step has used them?"""

from collections.abc import Iterator

from accel_demo.lab.audit.evidence import Evidence, Rank
from accel_demo.lab.audit.result import ERROR, NOTE, WARNING, Finding, NotChecked

PAGE = "23_accumulation"
RARELY = 0.3  # of the steps: a script may skip a batch on purpose


def check(evidence: Evidence) -> Iterator[Finding]:
    if not any(evidence.counts("step")):
        raise NotChecked("there was no optimizer step")
    ranks = [rank for rank in evidence.ranks if rank.of("thrown")]
    if not ranks:
        return
    first = ranks[0]
    thrown, steps = first.of("thrown"), first.of("step")
    optimizers = {event["optimizer"] for event in steps}
    if len(optimizers) > 1:
        return  # a GAN's generator gets gradients from the discriminator's loss, and drops them
    lost = sum(event["backwards"] for event in thrown)
    is_regular = len(thrown) > RARELY * len(steps)
    if all(_follows_a_pass(first, event) for event in thrown):
        finding = Finding(
            WARNING,
            "thrown",
            f"The gradients of the last backward passes of an epoch are set to zero before an "
            f"optimizer step has used them ({lost} of {len(first.of('backward'))}).",
            "Make a step after the last batch of an epoch, even if fewer batches than usual were "
            "accumulated; accelerator.accumulate does so.",
            PAGE,
        )
    else:
        finding = Finding(
            ERROR if is_regular else NOTE,
            "thrown",
            f"The gradients of {lost} of {len(first.of('backward'))} backward passes are set to "
            "zero before an optimizer step has used them.",
            "Call zero_grad() right after optimizer.step(), not before every backward pass.",
            PAGE,
        )
    for rank in ranks:
        finding.add_place(rank.of("thrown")[0]["line"], rank.number)
    yield finding


def _follows_a_pass(rank: Rank, event: dict) -> bool:
    """Return True if a pass over a loader has ended, and no batch was read before this event."""
    before = [each for each in rank.of("batch", "pass end") if each["time"] < event["time"]]
    return bool(before) and before[-1]["kind"] == "pass end"
