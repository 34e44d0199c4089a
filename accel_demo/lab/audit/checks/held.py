"""Does an optimizer hold exactly the parameters that are trained?"""

from collections.abc import Iterator

from accel_demo.lab.audit.result import ERROR, WARNING, Finding
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.places import NotChecked

PAGE = "11_from_one_process_to_many"
LEAST = 6  # steps without a gradient that are suspicious


def check(evidence: Evidence) -> Iterator[Finding]:
    rank = next((rank for rank in evidence.ranks if rank.of("models")), None)
    if rank is None:
        raise NotChecked("there was no optimizer step")
    models = rank.of("models")[-1]["models"]
    for optimizer in sorted({step["optimizer"] for step in rank.of("step")}):
        if finding := _without_gradient(evidence, optimizer):
            yield finding
            if finding.verdict == ERROR:
                return
    for model in models:
        trained = [
            (name, holder) for name, holder, needs, has in model["parameters"] if needs and has
        ]
        missing = [name for name, holder in trained if holder is None]
        if missing and len(missing) < len(trained):
            finding = Finding(
                WARNING,
                "held",
                f"No optimizer holds {_listed(missing)} of {_name(model)}, although they get "
                "gradients.",
                "Add these parameters to the optimizer, or, if they should not be trained, call "
                "requires_grad_(False) on them.",
                PAGE,
            )
            yield _with_places(finding, evidence, {holder for _, holder in trained})


def _without_gradient(evidence: Evidence, optimizer: int) -> Finding | None:
    """Report parameters of an optimizer that got no gradient on any rank before any step."""
    rank = next(rank for rank in evidence.ranks if rank.steps(optimizer))
    steps = [step for each in evidence.ranks for step in each.steps(optimizer)]
    without = {tuple(step["without_gradient"]) for step in steps}
    never = set.intersection(*map(set, without))
    if not never or not rank.of("backward"):
        return None
    name = steps[0]["name"]
    if len(never) == steps[0]["parameters"]:
        if any(each["optimizer"] == optimizer for each in rank.of("thrown")):
            return None  # it got gradients, but they were set to zero
        finding = Finding(
            ERROR,
            "held",
            f"{name} changes nothing: none of the parameters that it holds ever gets a gradient. "
            "It was created for a different model, or for a copy.",
            "Create the optimizer from the parameters of the model that is trained, after the "
            "model was moved, copied or wrapped.",
            PAGE,
        )
        return _with_places(finding, evidence, {optimizer})
    snapshots = [
        {
            parameter
            for model in event["models"]
            for parameter, holder, needs, has in model["parameters"]
            if holder == optimizer and needs and not has
        }
        for event in rank.of("models")
        if event["optimizer"] == optimizer
    ]
    names = sorted(set.intersection(*snapshots)) if snapshots else []
    if not names or len(rank.steps(optimizer)) < LEAST or len(without) > 1:
        return None  # if other steps use other parameters, later ones may use these
    finding = Finding(
        WARNING,
        "held",
        f"{name} holds {_listed(names)}, but "
        + ("it never gets a gradient." if len(names) == 1 else "they never get a gradient."),
        "Look where the forward pass leaves the graph (item(), detach(), no_grad()), or call "
        "requires_grad_(False) on parameters that are not meant to be trained.",
        PAGE,
    )
    return _with_places(finding, evidence, {optimizer})


def _with_places(finding: Finding, evidence: Evidence, optimizers: set) -> Finding:
    """Add the lines that create the optimizers, and those that call `step`."""
    for kind in ("optimizer", "step"):
        for rank in evidence.ranks:
            for event in rank.of(kind):
                if event["optimizer"] in optimizers:
                    finding.add_place(event["line"], rank.number)
    return finding


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(name.removeprefix("module.") for name in names[:3]) + more


def _name(model: dict) -> str:
    return model["inner"] if model["class"] == "DistributedDataParallel" else model["class"]
