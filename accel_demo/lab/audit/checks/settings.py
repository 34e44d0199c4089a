"""Do all ranks make their steps with equal settings, and read batches of equal size?"""

from collections.abc import Iterator

from accel_demo.lab.audit.result import ERROR, NOTE, WARNING, Finding
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.places import NotChecked
from accel_demo.lab.observed.ranks import Rank

PAGE = "31_batch_and_learning_rate"


def check(evidence: Evidence) -> Iterator[Finding]:
    evidence.require_data_parallel()
    if any(rank.first("step") is None for rank in evidence.ranks):
        raise NotChecked("not every rank made an optimizer step")
    yield from _different_settings(evidence)
    if not evidence.joins:
        yield from _different_batch_sizes(evidence)


def _different_settings(evidence: Evidence) -> Iterator[Finding]:
    for optimizers in evidence.optimizers:
        own = zip(evidence.ranks, optimizers, strict=True)
        steps = zip(*(rank.steps(optimizer) for rank, optimizer in own), strict=False)
        for number, same in enumerate(steps):
            name, values = different_setting([step["settings"] for step in same])
            if name is None:
                continue
            listed = (
                f"rank {rank.number} with {name}={value}"
                for rank, value in zip(evidence.ranks, values, strict=True)
            )
            before, after = ({step[when] for step in same} for when in ("before", "total"))
            is_apart = len(before) == 1 < len(after)
            finding = Finding(
                ERROR if is_apart or all(evidence.counts("wrapped")) else WARNING,
                "settings",
                f"The ranks make step {number + 1} with different settings: {', '.join(listed)}."
                + " Their weights are no longer equal after it." * is_apart,
                "Give all ranks the same settings. A schedule that reads a loss, such as "
                "ReduceLROnPlateau, needs the mean over all ranks.",
                PAGE,
            )
            for rank, step in zip(evidence.ranks, same, strict=True):
                for line in _causes(rank, step["optimizer"], step["time"]):
                    finding.add_place(line, rank.number)
            yield finding
            break


def different_setting(settings: list[list[dict]]) -> tuple[str | None, list[str]]:
    """Return the first setting in which the parameter groups of the ranks differ, and its values.

    A setting is a number, or several ones, such as the betas of Adam.
    """
    for groups in zip(*settings, strict=False):
        for name in groups[0]:
            values = [group.get(name) for group in groups]
            if len(set(map(str, values))) > 1:
                if all(isinstance(value, list) for value in values):
                    return name, [str(tuple(value)) for value in values]
                if all(isinstance(value, (int, float)) for value in values):
                    return name, [f"{value:.6g}" for value in values]
    return None, []


def _causes(rank: Rank, optimizer: int, time: float) -> list[list]:
    """Return the lines that may have set the settings: the schedule's, or the constructor's."""
    before = [
        event["line"]
        for event in rank.of("schedule")
        if event["optimizer"] == optimizer and event["time"] < time
    ]
    made = [each["line"] for each in rank.of("optimizer") if each["optimizer"] == optimizer]
    return before[-1:] or made[:1]


def _different_batch_sizes(evidence: Evidence) -> Iterator[Finding]:
    """Compare the n-th training loaders of the ranks. Losses may be weighted: a note."""
    loaders = [list(rank.training_passes) for rank in evidence.ranks]
    if len({len(each) for each in loaders}) > 1:
        return
    for numbers in zip(*loaders, strict=True):
        own = zip(evidence.ranks, numbers, strict=True)
        begins = [rank.pass_of(loader) for rank, loader in own]
        sizes = [begin["batch_size"] for begin in begins]
        if None in sizes or len(set(sizes)) == 1:
            continue
        if len({str(begin["line"]) for begin in begins}) > 1:
            continue  # they are different loaders
        listed = (
            f"rank {rank.number} {size}" for rank, size in zip(evidence.ranks, sizes, strict=True)
        )
        finding = Finding(
            NOTE,
            "settings",
            f"The ranks read batches of different sizes ({', '.join(listed)}), but their gradients "
            "have equal weights in the average.",
            "Give all ranks the same batch size, or weight each loss by its number of samples.",
            PAGE,
        )
        for rank, begin in zip(evidence.ranks, begins, strict=True):
            finding.add_place(begin["line"], rank.number)
        yield finding
