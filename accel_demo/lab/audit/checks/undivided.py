"""Is each loss divided by the number of micro-batches that `accumulate` combines?"""

from collections.abc import Iterator

from accel_demo.lab.audit.evidence import Evidence
from accel_demo.lab.audit.result import WARNING, Finding, NotChecked

PAGE = "23_accumulation"


def check(evidence: Evidence) -> Iterator[Finding]:
    if not any(evidence.counts("backward")):
        raise NotChecked("there was no backward pass")
    passes = [
        (rank, event)
        for rank in evidence.ranks
        for event in rank.of("backward")
        if event["undivided"] > 1
    ]
    if len(passes) < 2 * len(evidence.ranks):
        return
    steps = passes[0][1]["undivided"]
    finding = Finding(
        WARNING,
        "undivided",
        f"The script calls loss.backward() inside accelerator.accumulate, so Accelerate does not "
        f"divide the loss by {steps}: the gradients of a step are {steps} times too large.",
        "Call accelerator.backward(loss).",
        PAGE,
    )
    for rank, event in passes:
        finding.add_place(event["line"], rank.number)
    yield finding
