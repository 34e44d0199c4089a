"""Are the gradients clipped when they are complete, averaged and unscaled?"""

from collections.abc import Iterator

from accel_demo.lab.audit.result import ERROR, WARNING, Finding
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.places import NotChecked
from accel_demo.lab.observed.ranks import Rank

PAGE = "23_accumulation"
SCALED_PAGE = "33_precision"
COMPLETE = (
    "Clip once per step, after its last backward pass; with Accelerate, only if "
    "accelerator.sync_gradients is True."
)


def check(evidence: Evidence) -> Iterator[Finding]:
    if not _clips(evidence, lambda clip: clip["is_changed"]):
        if any(evidence.counts("clip")):
            raise NotChecked("the clipping changed no gradients, which were small enough")
        raise NotChecked("no gradients were clipped")
    for kind in (_scaled, _after_the_step, _not_averaged, _partial):
        finding = kind(evidence)
        if finding is not None:
            yield finding
            return


def _scaled(evidence: Evidence) -> Finding | None:
    """Report gradients that a scaler unscales only in its step, after they were clipped."""
    scaled, factor = [], 1.0
    for rank in evidence.ranks:
        scales = {(step["optimizer"], step["number"]): step["scale"] for step in rank.of("step")}
        for clip in rank.of("clip"):
            scale = scales.get((clip["optimizer"], clip["step"])) or 1.0
            is_late = clip["is_unscaled"] or clip["is_used"]
            if scale != 1 and clip["is_changed"] and not is_late:
                scaled.append((rank, clip))
                factor = scale
    if not scaled:
        return None
    sentence = (
        f"The gradients are clipped while they are still multiplied by {factor:g}, "
        "the factor of the GradScaler."
    )
    cure = "Call scaler.unscale_(optimizer) before clipping."
    return _at(scaled, Finding(ERROR, "clipping", sentence, cure, SCALED_PAGE))


def _after_the_step(evidence: Evidence) -> Finding | None:
    late = _clips(evidence, lambda clip: clip["is_used"] and clip["is_changed"])
    others = _clips(evidence, lambda clip: not clip["is_used"])
    if not late or len(others) >= len(late):
        return None
    sentence = "The gradients are clipped after the optimizer step that uses them."
    cure = "Clip after the backward pass, and before optimizer.step()."
    return _at(late, Finding(ERROR, "clipping", sentence, cure, PAGE))


def _not_averaged(evidence: Evidence) -> Finding | None:
    """Report ranks that clip different gradients, although their step uses equal ones."""
    if not evidence.is_distributed:
        return None
    own: list = []
    for number, clips in enumerate(
        zip(*(rank.of("clip") for rank in evidence.ranks), strict=False)
    ):
        optimizer, step = clips[0]["optimizer"], clips[0]["step"]
        if any((each["optimizer"], each["step"]) != (optimizer, step) for each in clips):
            break  # the ranks do different things
        at_step = {_gradients_at(rank, optimizer, step) for rank in evidence.ranks}
        sums = {each["gradients"] for each in clips}
        is_changed = any(each["is_changed"] for each in clips)
        is_averaged = len(at_step) == 1 and None not in at_step
        if is_changed and is_averaged and len(sums - {None}) > 1:
            own += [(rank, rank.of("clip")[number]) for rank in evidence.ranks]
    if not own:
        return None
    sentence = (
        "Each rank clips its own gradients, before they are averaged: the ranks multiply them by "
        "different factors."
    )
    cure = f"{COMPLETE} Differential privacy clips the gradients of each sample on purpose."
    return _at(own, Finding(WARNING, "clipping", sentence, cure, PAGE))


def _gradients_at(rank: Rank, optimizer: int, number: int) -> int | None:
    return next(
        (step.get("gradients") for step in rank.steps(optimizer) if step["number"] == number), None
    )


def _partial(evidence: Evidence) -> Finding | None:
    """Report gradients that are clipped before another backward pass adds to them."""
    rank = evidence.ranks[0]
    if len({step["optimizer"] for step in rank.of("step")}) > 1:
        return None  # the pass may belong to another optimizer
    partial, latest = [], None
    for event in rank.of("clip", "backward", "step", "thrown"):
        if event["kind"] == "clip":
            latest = event if event["is_changed"] and not event["is_used"] else latest
        elif event["kind"] == "backward" and latest is not None:
            partial.append((rank, latest))
            latest = None
        elif event["kind"] in ("step", "thrown"):
            latest = None
    if len(partial) < 2:
        return None
    sentence = "The gradients are clipped before all backward passes of a step are done."
    finding = Finding(WARNING, "clipping", sentence, COMPLETE, PAGE)
    for each in evidence.ranks:
        finding.add_place(partial[0][1]["line"], each.number)
    return finding


def _clips(evidence: Evidence, is_meant) -> list[tuple[Rank, dict]]:
    return [(rank, clip) for rank in evidence.ranks for clip in rank.of("clip") if is_meant(clip)]


def _at(clips: list[tuple[Rank, dict]], finding: Finding) -> Finding:
    for rank, clip in clips:
        finding.add_place(clip["line"], rank.number)
    return finding
