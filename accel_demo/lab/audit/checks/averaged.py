"""Does the script change gradients that DistributedDataParallel has averaged already?"""

from collections.abc import Iterator

from accel_demo.lab.audit.evidence import Evidence
from accel_demo.lab.audit.result import ERROR, NOTE, WARNING, Finding, NotChecked

PAGE = "22_ddp"
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
    if lines and _is_regular(factors, 1.0):
        finding = Finding(
            NOTE,
            "averaged",
            "The script all-reduces the gradients again, although DistributedDataParallel has "
            "averaged them, and divides by the number of ranks, so it changes nothing.",
            CURE,
            PAGE,
        )
        for number, own in lines.items():
            for line in own:
                finding.add_place(line, number)
        yield finding
    for factor in (1 / world, float(world)):
        if not _is_regular(factors, factor):
            continue
        if (
            factor < 1
            and not lines
            and any(step["accumulated"] == world for step in rank.of("step"))
        ):
            continue  # the script divides by the number of micro-batches
        is_divided = factor < 1
        change = "divided" if is_divided else "multiplied"
        finding = Finding(
            ERROR if lines else WARNING,
            "averaged",
            f"The gradients are {change} by {world} after DistributedDataParallel has averaged "
            "them: "
            + ("they are averaged twice." if is_divided else f"they are {world} times too large."),
            CURE,
            PAGE,
        )
        for each in evidence.ranks:
            own = lines.get(each.number) or [
                event["line"] for kind in ("backward", "step") for event in each.of(kind)[:1]
            ]
            for line in own:
                finding.add_place(line, each.number)
        yield finding


def _is_regular(factors: list[float], factor: float) -> bool:
    """Return True if nearly all steps use gradients that were multiplied by a factor."""
    same = [each for each in factors if abs(each / factor - 1) < 1e-3]
    return len(same) >= max(LEAST, 0.8 * len(factors))


def _lines_that_reduce_gradients(evidence: Evidence) -> dict[int, list]:
    """Map the ranks to the lines that all-reduce tensors with the shapes of all parameters."""
    found: dict[int, list] = {}
    for rank in evidence.ranks:
        weights = rank.first("weights")
        shapes = {tuple(shape) for shape in weights["shapes"]} if weights else set()
        by_line: dict[tuple, set] = {}
        for each in rank.collectives:
            if "all_reduce" in each["name"] and each["line"] and len(each["sizes"]) == 1:
                sizes = by_line.setdefault(tuple(each["line"]), set())
                sizes.add(tuple(each["sizes"][0]))
        found[rank.number] = [
            list(line) for line, sizes in by_line.items() if shapes and sizes >= shapes
        ]
    return {number: lines for number, lines in found.items() if lines}
