"""Are the weights of all ranks equal after each optimizer step?"""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from accel_demo.lab.audit.result import ERROR, NOTE, WARNING, Finding
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.places import NotChecked
from accel_demo.lab.observed.ranks import Rank

PAGE, LOCAL_PAGE = "22_ddp", "46_send_less"
# The error of the forward pass after a backward pass that DDP could not finish
UNFINISHED = "Expected to have finished reduction in the prior iteration"
# Local steps look like these mistakes until the first average
MORE_STEPS = " If you train with local steps, let the audit see an average: --steps, --batches."


def check(evidence: Evidence) -> Iterator[Finding]:
    evidence.require_data_parallel()
    if evidence.joins:
        raise NotChecked("the ranks train inside Join, where they make different numbers of steps")
    if any(rank.error and UNFINISHED in rank.error["message"] for rank in evidence.ranks):
        raise NotChecked("DDP has not averaged all gradients of the last step, as its error says")
    if any(rank.first("weights") is None for rank in evidence.ranks):
        raise NotChecked("not every rank made an optimizer step")
    compared = False
    for optimizers in evidence.optimizers:
        own = list(zip(evidence.ranks, optimizers, strict=True))
        steps = [rank.steps(optimizer) for rank, optimizer in own]
        totals = list(zip(*([step["total"] for step in each] for each in steps), strict=False))
        if not totals or None in totals[0]:
            continue
        compared = True
        if _started_differently(own):
            continue  # reported by `initial`
        equal = [len(set(each)) == 1 for each in totals]
        if all(equal):
            continue
        number = equal.index(False)
        pairs = zip(*([step["before"] for step in each[1:]] for each in steps), strict=False)
        equal_later = [len(set(each)) == 1 for each in pairs]
        averaged = [
            step
            for step, is_equal in enumerate(equal, start=1)
            if is_equal or (step <= len(equal_later) and equal_later[step - 1])
        ]
        if averaged and averaged[-1] > number:
            yield from _local_steps(evidence, optimizers, averaged, len(totals))
            continue
        if _end_equally(evidence, optimizers):
            continue  # all steps were local, and the weights were averaged at the end
        if every := [event["every"] for rank in evidence.ranks for event in rank.of("local steps")]:
            raise NotChecked(
                f"LocalSGD averages the weights after {min(every)} steps, and the audit saw only "
                f"{len(totals)}"
            )
        saw_all = not any(evidence.counts("enough"))
        reason, cure = _reason(*own[0], steps[0][: number + 1], "" if saw_all else MORE_STEPS)
        finding = Finding(
            ERROR,
            "replicas",
            f"The weights of the ranks differ after step {number + 1}: {reason}.",
            cure,
            PAGE,
        )
        for rank, each in zip(evidence.ranks, steps, strict=True):
            backward = _backwards_of(rank, each[: number + 1])
            finding.add_place((backward or [each[number]])[-1]["line"], rank.number)
        yield finding
    if not compared:
        raise NotChecked("the parameters are shards, or there was no step")


def _local_steps(
    evidence: Evidence, optimizers: tuple[int, ...], averaged: list[int], steps: int
) -> Iterator[Finding]:
    """Check training with local steps, whose weights are equal after the steps in `averaged`."""
    gaps = Counter(later - earlier for earlier, later in pairwise([0, *averaged]))
    [(usual, _)] = gaps.most_common(1)
    if usual == 1 or len(gaps) > 2:  # the end of an epoch may have a gap of its own
        yield Finding(
            NOTE,
            "replicas",
            "The weights of the ranks differ after some steps and are equal again later, as in "
            "training with local steps, but at irregular intervals.",
            "If this is not what you want, average the gradients before each step.",
            LOCAL_PAGE,
        )
    if _end_equally(evidence, optimizers) is False and not any(evidence.counts("enough")):
        finding = Finding(
            WARNING,
            "replicas",
            f"The weights of the ranks are equal after step {averaged[-1]}, but differ at the end, "
            f"after step {steps}: the last local steps were not averaged.",
            "Average the weights once more after the last step, before you save or evaluate them.",
            LOCAL_PAGE,
        )
        yield finding.add_places_of(evidence.ranks, "step")


def _end_equally(evidence: Evidence, optimizers: tuple[int, ...]) -> bool | None:
    """Return whether all ranks have the same weights at the end, or None if it is unknown."""
    last = [
        [each["total"] for each in rank.of("last weights") if each["optimizer"] == optimizer]
        for rank, optimizer in zip(evidence.ranks, optimizers, strict=True)
    ]
    if not all(last) or any(totals[-1] is None for totals in last):
        return None
    return len({totals[-1] for totals in last}) == 1


def _started_differently(own: list[tuple[Rank, int]]) -> bool:
    starts = [
        tuple(event["sums"] or [])
        for rank, optimizer in own
        for event in rank.of("weights")
        if event["optimizer"] == optimizer
    ]
    return len(set(starts)) > 1


def _backwards_of(rank: Rank, steps: list[dict]) -> list[dict]:
    """Return the backward passes since the step before the last one of `steps`."""
    begin = steps[-2]["time"] if len(steps) > 1 else 0
    return [each for each in rank.of("backward") if begin < each["time"] <= steps[-1]["time"]]


def _reason(rank: Rank, optimizer: int, steps: list[dict], if_local: str) -> tuple[str, str]:
    """Return why the gradients of an optimizer were not averaged, and the cure.

    The cure ends with `if_local` if the steps may be local ones.
    """
    models = rank.of("models")[-1]["models"]
    wrapped = [
        model
        for model in models
        if model["class"] == "DistributedDataParallel"
        and any(holder == optimizer for _, holder, *_ in model["parameters"])
    ]
    numbers = {model["replica"] for model in wrapped}
    forwards = [
        synchronized
        for backward in _backwards_of(rank, steps)
        for number, synchronized in backward["replicas"]
        if number in numbers
    ]
    if forwards and not any(forwards):
        return (
            "all backward passes of this step ran inside no_sync(), so no gradients were averaged",
            "Leave no_sync() for the last backward pass before each step." + if_local,
        )
    if wrapped and not forwards:
        return (
            "the model is wrapped in DistributedDataParallel, but called without the wrapper, so "
            "its gradients are not averaged",
            "Call the wrapped model, not model.module or a reference from before wrapping.",
        )
    accelerators, prepared = rank.of("accelerator"), rank.of("prepared")
    if accelerators and not any("model" in event["kinds"] for event in prepared):
        return (
            "the model was not passed to accelerator.prepare, so its gradients are not averaged",
            "Pass the model to accelerator.prepare, and use what it returns.",
        )
    if not wrapped:
        return (
            "the model is not wrapped in DistributedDataParallel, so no gradients are averaged",
            "Wrap the model in DistributedDataParallel before training." + if_local,
        )
    return (
        "something changes the weights or the gradients of one rank alone",
        "Look for code that runs on one rank only, between the backward pass and the step.",
    )
