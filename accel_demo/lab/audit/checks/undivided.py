"""Is each loss divided once by the number of micro-batches that `accumulate` combines?"""

from collections.abc import Iterator

from accel_demo.lab.audit.result import WARNING, Finding
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.places import NotChecked

PAGE = "23_accumulation"


def check(evidence: Evidence) -> Iterator[Finding]:
    events = [event for rank in evidence.ranks for event in rank.of("backward", "step")]
    passes = [each for each in events if each.get("micro_batches", 1) > 1]
    if not passes:
        raise NotChecked("no accelerator.accumulate combines micro-batches")
    steps, least = passes[0]["micro_batches"], 2 * len(evidence.ranks)
    divisions = [each["divisions"] for each in passes]
    divides_gradients = any(abs((each.get("factor") or 0) * steps - 1) < 1e-3 for each in events)
    if divisions.count(0) >= least and not divides_gradients:
        finding = Finding(
            WARNING,
            "undivided",
            f"The script calls loss.backward() inside accelerator.accumulate, so Accelerate does "
            f"not divide the loss by {steps}: the gradients of a step are {steps} times too large.",
            "Call accelerator.backward(loss).",
            PAGE,
        )
        yield finding.add_places_of(evidence.ranks, "backward", micro_batches=steps, divisions=0)
    elif divisions.count(2) >= least:
        finding = Finding(
            WARNING,
            "undivided",
            f"The script divides the loss by {steps}, and accelerator.backward divides it by "
            f"{steps} again: the gradients of a step are {steps} times too small.",
            "Pass the undivided loss to accelerator.backward.",
            PAGE,
        )
        yield finding.add_places_of(evidence.ranks, "backward", micro_batches=steps, divisions=2)
