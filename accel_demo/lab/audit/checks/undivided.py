"""Is each loss divided once by the number of micro-batches that `accumulate` combines?"""

from collections.abc import Iterator

from accel_demo.lab.audit.evidence import Evidence
from accel_demo.lab.audit.result import WARNING, Finding, NotChecked

PAGE = "23_accumulation"


def check(evidence: Evidence) -> Iterator[Finding]:
    passes = [
        (rank, event)
        for rank in evidence.ranks
        for event in rank.of("backward")
        if event["micro_batches"] > 1
    ]
    if not passes:
        raise NotChecked("no accelerator.accumulate combines micro-batches")
    steps = passes[0][1]["micro_batches"]
    undivided = [(rank, event) for rank, event in passes if not event["is_divided"]]
    twice = [(rank, event) for rank, event in passes if event["is_divided_twice"]]
    if len(undivided) >= 2 * len(evidence.ranks):
        finding = Finding(
            WARNING,
            "undivided",
            f"The script calls loss.backward() inside accelerator.accumulate, so Accelerate does "
            f"not divide the loss by {steps}: the gradients of a step are {steps} times too large.",
            "Call accelerator.backward(loss).",
            PAGE,
        )
        yield _at(undivided, finding)
    elif len(twice) >= 2 * len(evidence.ranks):
        finding = Finding(
            WARNING,
            "undivided",
            f"The script divides the loss by {steps}, and accelerator.backward divides it by "
            f"{steps} again: the gradients of a step are {steps} times too small.",
            "Pass the undivided loss to accelerator.backward.",
            PAGE,
        )
        yield _at(twice, finding)


def _at(passes: list, finding: Finding) -> Finding:
    for rank, event in passes:
        finding.add_place(event["line"], rank.number)
    return finding
