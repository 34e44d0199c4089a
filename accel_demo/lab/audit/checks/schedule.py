"""Does a learning rate schedule advance once per optimizer step, or once per epoch?"""

from collections.abc import Iterator

from accel_demo.lab.audit.evidence import Evidence, Rank
from accel_demo.lab.audit.result import ERROR, Finding, NotChecked

PAGE = "31_batch_and_learning_rate"


def check(evidence: Evidence) -> Iterator[Finding]:
    if not any(evidence.counts("schedule")):
        raise NotChecked("no learning rate schedule advanced")
    rank = next(rank for rank in evidence.ranks if rank.of("schedule"))
    for scheduler in sorted({event["scheduler"] for event in rank.of("schedule")}):
        events = [each for each in rank.of("schedule") if each["scheduler"] == scheduler]
        windows = _calls_between_steps(rank, scheduler, events[0]["optimizer"])
        regular = [calls for calls in windows if calls > 1]
        if len(windows) > 1 and len(regular) >= 0.6 * len(windows):
            calls = max(set(regular), key=regular.count)
            finding = Finding(
                ERROR,
                "schedule",
                f"{events[0]['name']} advances {calls} times per optimizer step, so the learning "
                "rate changes too quickly.",
                "Call scheduler.step() once after each optimizer.step(), not for each micro-batch.",
                PAGE,
            )
            for each in evidence.ranks:
                own = [event for event in each.of("schedule") if event["scheduler"] == scheduler]
                if own:
                    finding.add_place(own[0]["line"], each.number)
            yield finding


def _calls_between_steps(rank: Rank, scheduler: int, optimizer: int) -> list[int]:
    """Return how often the schedule was called after each optimizer step and before the next."""
    calls: list[int] = []
    for event in rank.events:
        if event["kind"] == "step" and event["optimizer"] == optimizer:
            calls.append(0)
        elif event["kind"] == "schedule" and event["scheduler"] == scheduler and calls:
            calls[-1] += 1
    return calls
