"""Are gradients set to zero before a step has used them?"""

from collections.abc import Iterator

from accel_demo.lab.audit.result import ERROR, NOTE, WARNING, Finding
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.places import NotChecked
from accel_demo.lab.observed.ranks import Rank

PAGE = "23_accumulation"
RARELY = 0.3  # of the steps: a script may skip a batch on purpose


def check(evidence: Evidence) -> Iterator[Finding]:
    if not any(evidence.counts("step")):
        raise NotChecked("there was no optimizer step")
    first = next((rank for rank in evidence.ranks if _thrown(rank)), None)
    if first is None:
        return
    steps = first.of("step")
    if any(step["accumulated"] == 0 and step.get("has_gradients") for step in steps):
        raise NotChecked("the script computes the gradients of its steps itself")
    if len({event["optimizer"] for event in steps}) > 1:
        # A GAN's generator gets gradients from the discriminator's loss, and drops them.
        raise NotChecked("several optimizers make steps")
    thrown = [
        event
        for event in _thrown(first)
        if not _is_made_by_the_audit(first, event) and not _is_for_inputs(first, event)
    ]
    if not thrown:
        return
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
            "Call zero_grad() right after optimizer.step(), and nowhere else.",
            PAGE,
        )
    for rank in evidence.ranks:
        for event in _thrown(rank)[:1]:
            finding.add_place(event["line"], rank.number)
    yield finding


def _thrown(rank: Rank) -> list[dict]:
    """Return the losses of optimizers that make steps. Another one, such as SAM, wraps them."""
    stepping = {step["optimizer"] for step in rank.of("step")}
    return [event for event in rank.of("thrown") if event["optimizer"] in stepping]


def _is_for_inputs(rank: Rank, event: dict) -> bool:
    """Return True for backward passes that compute gradients of inputs, as FGSM does."""
    passes = [each for each in rank.of("backward") if each["time"] < event["time"]]
    return all(each["is_for_inputs"] for each in passes[-event["backwards"] :])


def _last_before(rank: Rank, event: dict) -> dict | None:
    """Return the last batch or end of a pass before an event."""
    before = [each for each in rank.of("batch", "pass end") if each["time"] < event["time"]]
    return before[-1] if before else None


def _follows_a_pass(rank: Rank, event: dict) -> bool:
    """Return True if a pass over a loader has ended, and no batch was read before this event."""
    last = _last_before(rank, event)
    return last is not None and last["kind"] == "pass end"


def _is_made_by_the_audit(rank: Rank, event: dict) -> bool:
    """Return True if accumulation would have ended with the pass, if it had not been shortened."""
    last = _last_before(rank, event)
    if last is None or last["kind"] == "batch" or last["batches"] == last["whole"]:
        return False
    windows = [step["backwards"] for step in rank.of("step")]
    window = max(set(windows), key=windows.count)
    return last["whole"] is None or window == 0 or last["whole"] % window == 0
