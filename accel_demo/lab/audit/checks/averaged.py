"""Is the average of DistributedDataParallel the gradient that the script means?

Usually it is not if the script changes it, or if the losses are means over different numbers.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from accel_demo.lab.audit.result import ERROR, NOTE, WARNING, Finding
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.places import NotChecked

PAGE, TOKENS_PAGE = "22_ddp", "95_parts"
LEAST = 2  # steps
CURE = "Remove your own averaging: the backward pass of the wrapped model has done it."


def check(evidence: Evidence) -> Iterator[Finding]:
    evidence.require_connected()
    rank, world = evidence.ranks[0], evidence.ranks[0].connected_world
    if not rank.of("wrapped"):
        raise NotChecked("no model is wrapped in DistributedDataParallel")
    factors = [step["factor"] for step in rank.of("step") if step.get("factor")]
    if not factors:
        raise NotChecked(
            "the script also clips the gradients"
            if any(clip["is_changed"] for clip in rank.of("clip"))
            else "no step used only gradients that DistributedDataParallel had averaged"
        )
    lines = _lines_that_reduce_gradients(evidence)
    if not lines:
        if all(abs(factor - 1) < 1e-3 for factor in factors):
            yield from _means_over_different_numbers(evidence)
            return
        if _may_be_meant(evidence) or not _is_regular(factors, 1 / world):
            raise NotChecked("the script multiplies or divides the gradients itself, maybe rightly")
        finding = Finding(
            WARNING,
            "averaged",
            f"The gradients are divided by {world} after DistributedDataParallel has averaged "
            "them: they are averaged twice.",
            CURE,
            PAGE,
        )
        for kind in ("backward", "step"):
            lines = {each.number: [each.of(kind)[0]["line"]] for each in evidence.ranks}
            _at(lines, finding)
        yield finding
        return
    if _is_regular(factors, 1.0):
        finding = Finding(
            NOTE,
            "averaged",
            "The script all-reduces the gradients again, although DistributedDataParallel has "
            "averaged them, and divides by the number of ranks, so it changes nothing.",
            CURE,
            PAGE,
        )
        yield _at(lines, finding)
    for factor in (1 / world, float(world)):
        if not _is_regular(factors, factor):
            continue
        is_divided = factor < 1
        change = "divided" if is_divided else "multiplied"
        finding = Finding(
            ERROR,
            "averaged",
            f"The gradients are {change} by {world} after DistributedDataParallel has averaged "
            "them: "
            + ("they are averaged twice." if is_divided else f"they are {world} times too large."),
            CURE,
            PAGE,
        )
        yield _at(lines, finding)


def _means_over_different_numbers(evidence: Evidence) -> Iterator[Finding]:
    """Note losses that leave out `ignore_index`, which the ranks do not have equally often.

    It is not enough if a few passes have different numbers: the last batches may be smaller.
    """
    targets = [[each["targets"] for each in rank.of("backward")] for rank in evidence.ranks]
    known = [each for each in zip(*targets, strict=False) if None not in each]
    different = [each for each in known if len({counted for counted, _ in each}) > 1]
    different = [each for each in different if any(counted < whole for counted, whole in each)]
    if len(different) < max(LEAST, len(known) / 2):
        return
    numbers = " and ".join(str(counted) for counted, _ in different[0][:2])
    finding = Finding(
        NOTE,
        "averaged",
        f"Each rank's loss is a mean over a different number of targets, for example {numbers}, "
        "because of ignore_index. The average of such gradients is not the gradient of the mean "
        "over all targets.",
        "To weight all targets equally, multiply the loss by the number of this rank's targets and "
        "divide it by the mean of these numbers over all ranks.",
        TOKENS_PAGE,
    )
    yield finding.add_places_of(evidence.ranks, "backward")


def _may_be_meant(evidence: Evidence) -> bool:
    """Return True if a loss has a factor, or gradients are divided by the number of batches."""
    rank, world = evidence.ranks[0], evidence.ranks[0].connected_world
    has_factor = any(event["has_factor"] for event in rank.of("backward"))
    return has_factor or any(step["accumulated"] == world for step in rank.of("step"))


def _at(lines: dict[int, list], finding: Finding) -> Finding:
    for number, own in lines.items():
        for line in own:
            finding.add_place(line, number)
    return finding


def _is_regular(factors: list[float], factor: float) -> bool:
    """Return True if nearly all steps use gradients that were multiplied by a factor."""
    same = [each for each in factors if abs(each / factor - 1) < 1e-3]
    return len(same) >= max(LEAST, 0.8 * len(factors))


def _lines_that_reduce_gradients(evidence: Evidence) -> dict[int, list]:
    """Map the ranks to the lines that all-reduce all gradients before each step.

    Such a line all-reduces tensors with the shapes of all parameters, between the last backward
    pass and the step, in nearly all steps since the oldest collective that is known.
    """
    found: dict[int, list] = {}
    for rank in evidence.ranks:
        weights = rank.first("weights")
        shapes = {tuple(shape) for shape in weights["shapes"]} if weights else set()
        reduces = [
            each for each in rank.collectives if "all_reduce" in each["name"] and each["line"]
        ]
        events = rank.of("backward", "step")
        windows = [
            (before["time"], step["time"])
            for before, step in pairwise(events)
            if before["kind"] == "backward" and step["kind"] == "step"
            if reduces and before["time"] > rank.collectives[0]["time"]
        ]
        counts: Counter = Counter()
        for begin, end in windows:
            by_line: dict[tuple, set] = {}
            for each in reduces:
                if begin < each["time"] < end:
                    sizes = by_line.setdefault(tuple(each["line"]), set())
                    sizes.update(map(tuple, each["sizes"]))
            counts.update(line for line, sizes in by_line.items() if shapes and sizes >= shapes)
        found[rank.number] = [list(line) for line, n in counts.items() if n >= 0.8 * len(windows)]
    return {number: lines for number, lines in found.items() if lines}
