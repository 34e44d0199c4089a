"""Do all ranks make their steps with equal settings, and read batches of equal size?"""

from collections.abc import Iterator

from accel_demo.lab.audit.evidence import Evidence
from accel_demo.lab.audit.ranks import Rank
from accel_demo.lab.audit.result import ERROR, WARNING, Finding, NotChecked

PAGE = "31_batch_and_learning_rate"


def check(evidence: Evidence) -> Iterator[Finding]:
    evidence.require_data_parallel()
    if any(rank.first("step") is None for rank in evidence.ranks):
        raise NotChecked("not every rank made an optimizer step")
    yield from _different_settings(evidence)
    if not evidence.joins:
        yield from _different_batch_sizes(evidence)


def _different_settings(evidence: Evidence) -> Iterator[Finding]:
    first = evidence.ranks[0]
    for optimizer in sorted({step["optimizer"] for step in first.of("step")}):
        steps = zip(*(rank.steps(optimizer) for rank in evidence.ranks), strict=False)
        for number, same in enumerate(steps):
            name, values = _difference([step["settings"] for step in same])
            if name is None:
                continue
            listed = (
                f"rank {rank.number} with {name}={value:.6g}"
                for rank, value in zip(evidence.ranks, values, strict=True)
            )
            finding = Finding(
                ERROR,
                "settings",
                f"The ranks make step {number + 1} with different settings: {', '.join(listed)}. "
                "Their weights are no longer equal after it.",
                "Give all ranks the same settings. A schedule that reads a loss, such as "
                "ReduceLROnPlateau, needs the mean over all ranks.",
                PAGE,
            )
            for rank, step in zip(evidence.ranks, same, strict=True):
                for line in _causes(rank, optimizer, step["time"]):
                    finding.add_place(line, rank.number)
            yield finding
            break


def _difference(settings: list[list[dict]]) -> tuple[str | None, list[float]]:
    """Return the first number in which the parameter groups of the ranks differ, and its values."""
    for groups in zip(*settings, strict=False):
        for name in groups[0]:
            values = [group.get(name) for group in groups]
            if len(set(map(str, values))) > 1:
                numbers = [value[0] if isinstance(value, list) else value for value in values]
                if all(isinstance(number, (int, float)) for number in numbers):
                    return name, numbers
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
    for loader in evidence.ranks[0].training_passes:
        begins = [rank.pass_of(loader) for rank in evidence.ranks if loader in rank.training_passes]
        sizes = [begin["batch_size"] for begin in begins]
        if len(begins) < len(evidence.ranks) or None in sizes or len(set(sizes)) == 1:
            continue
        if len({str(begin["line"]) for begin in begins}) > 1:
            continue  # they are different loaders
        listed = (
            f"rank {rank.number} {size}" for rank, size in zip(evidence.ranks, sizes, strict=True)
        )
        finding = Finding(
            WARNING,
            "settings",
            f"The ranks read batches of different sizes ({', '.join(listed)}), but their gradients "
            "have equal weights in the average.",
            "Give all ranks the same batch size, or weight each loss by its number of samples.",
            PAGE,
        )
        for rank, begin in zip(evidence.ranks, begins, strict=True):
            finding.add_place(begin["line"], rank.number)
        yield finding
