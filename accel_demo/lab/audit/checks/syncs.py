"""Are gradients all-reduced in vain, because a later backward pass of the step does it again?"""

from collections.abc import Iterator

from accel_demo.lab.audit.result import NOTE, Finding
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.places import NotChecked
from accel_demo.lab.observed.ranks import Rank
from accel_demo.wording import byte_size

PAGE = "23_accumulation"


def check(evidence: Evidence) -> Iterator[Finding]:
    evidence.require_connected()
    rank = evidence.ranks[0]
    if not rank.of("wrapped"):
        raise NotChecked("no model is wrapped in DistributedDataParallel")
    if len({step["optimizer"] for step in rank.of("step")}) > 1:
        raise NotChecked("several optimizers make steps")
    for wrapped in rank.of("wrapped"):
        steps = _averaged_passes(rank, wrapped["replica"])
        repeated = [passes for passes in steps if len(passes) > 1]
        if not repeated or len(repeated) < 0.5 * len(steps):
            continue
        passes = max(repeated, key=len)
        size = byte_size((len(passes) - 1) * wrapped["bytes"])
        finding = Finding(
            NOTE,
            "syncs",
            f"{len(passes)} backward passes of a step average the gradients, though only the last "
            f"one needs to: {size} per step are all-reduced in vain.",
            "Run the others inside model.no_sync(), or use accelerator.accumulate(model).",
            PAGE,
        )
        for each in evidence.ranks:
            finding.add_place(passes[0]["line"], each.number)
        yield finding


def _averaged_passes(rank: Rank, replica: int) -> list[list[dict]]:
    """Return the passes whose gradients each step uses, and that average those of a replica."""
    steps: list[list[dict]] = []
    passes: list[dict] = []
    for event in rank.of("backward", "step"):
        if event["kind"] == "backward":
            passes.append(event)
            continue
        used = passes[len(passes) - event["accumulated"] :]
        steps.append([each for each in used if [replica, True] in each["replicas"]])
        passes = []
    return [passes for passes in steps if passes]
