"""Does an optimizer hold exactly the parameters that are trained?"""

from collections.abc import Iterator

from accel_demo.lab.audit.evidence import Evidence
from accel_demo.lab.audit.result import ERROR, WARNING, Finding, NotChecked

PAGE = "11_from_one_process_to_many"


def check(evidence: Evidence) -> Iterator[Finding]:
    rank = next((rank for rank in evidence.ranks if rank.of("models")), None)
    if rank is None:
        raise NotChecked("there was no optimizer step")
    models = rank.of("models")[-1]["models"]
    steps = rank.of("step")
    line = steps[0]["line"] if steps else None
    never = set(steps[0]["without_gradient"]) if steps else set()
    for step in steps:
        if step["optimizer"] == steps[0]["optimizer"]:
            never &= set(step["without_gradient"])
    start = rank.first("weights")
    count = len(start["sums"] or []) if start else 0
    if steps and count and len(never) == count and len(rank.of("backward")) > 0:
        yield Finding(
            ERROR,
            "held",
            f"{steps[0]['name']} changes nothing: none of the parameters that it holds ever gets "
            "a gradient. It was created for a different model, or for a copy.",
            "Create the optimizer from the parameters of the model that is trained, after the "
            "model was moved, copied or wrapped.",
            PAGE,
        ).add_place(line, rank.number)
        return
    for model in models:
        trained = [
            (name, holder) for name, holder, needs, has in model["parameters"] if needs and has
        ]
        missing = [name for name, holder in trained if holder is None]
        if missing and len(missing) < len(trained):
            names = ", ".join(name.removeprefix("module.") for name in missing[:3])
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            yield Finding(
                WARNING,
                "held",
                f"No optimizer holds {names}{more} of {_name(model)}, although they get gradients.",
                "Add these parameters to the optimizer, or call requires_grad_(False) on them.",
                PAGE,
            ).add_place(line, rank.number)


def _name(model: dict) -> str:
    return model["inner"] if model["class"] == "DistributedDataParallel" else model["class"]
