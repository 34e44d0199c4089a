"""Does a learning rate schedule advance once per optimizer step, or once per epoch?"""

import re
from collections.abc import Iterator
from linecache import getlines

from accel_demo.lab.audit.evidence import Evidence
from accel_demo.lab.audit.ranks import Rank
from accel_demo.lab.audit.result import ERROR, WARNING, Finding, NotChecked, text_of

PAGE = "31_batch_and_learning_rate"
COSINE = "CosineAnnealingLR"  # may continue after its end: the rate then rises again
LEAST = 8  # steps without an advance that are suspicious


def check(evidence: Evidence) -> Iterator[Finding]:
    yield from _never_advanced(evidence)
    yield from _planned_for_another_length(evidence)
    if not any(evidence.counts("schedule")):
        raise NotChecked(
            "no learning rate schedule advanced"
            if any(evidence.counts("schedule made"))
            else "the script has no learning rate schedule"
        )
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
                "Call scheduler.step() once after each optimizer.step(), not for each micro-batch; "
                "with Accelerate, only if accelerator.sync_gradients is True.",
                PAGE,
            )
            for each in evidence.ranks:
                own = [event for event in each.of("schedule") if event["scheduler"] == scheduler]
                if own:
                    finding.add_place(own[0]["line"], each.number)
            yield finding


def _never_advanced(evidence: Evidence) -> Iterator[Finding]:
    """Report schedules whose `step` was called neither after a batch nor after an epoch."""
    rank = evidence.ranks[0]
    advanced = {event["optimizer"] for event in rank.of("schedule")}
    epochs = max((len(passes) for passes in rank.training_passes.values()), default=0)
    for made in rank.of("schedule made"):
        steps = rank.steps(made["optimizer"])
        if made["optimizer"] in advanced or len(steps) < LEAST or epochs < 3:
            continue
        if _may_advance_later(rank, made):
            continue
        advanced.add(made["optimizer"])
        finding = Finding(
            WARNING,
            "schedule",
            f"{made['name']} was created, but did not advance in {len(steps)} optimizer steps and "
            f"{epochs - 1} epochs: the learning rate does not change.",
            "Call scheduler.step() after each optimizer.step(), or after each epoch.",
            PAGE,
        )
        for each in evidence.ranks:
            for event in each.of("schedule made")[:1]:
                finding.add_place(event["line"], each.number)
        yield finding


def _may_advance_later(rank: Rank, made: dict) -> bool:
    """Return True if the script calls `step` of the schedule, and its passes were shortened."""
    if made["line"] is None or all(end["batches"] == end["whole"] for end in rank.of("pass end")):
        return False
    name = re.match(r"\s*([\w.]+)\s*=", text_of(made["line"]))
    call = f"{name[1]}.step(" if name else ".step("
    return any(call in line for line in getlines(made["line"][0]))


def _planned_for_another_length(evidence: Evidence) -> Iterator[Finding]:
    """Report schedules whose length is wrong by the number of processes or micro-batches.

    Only a complete run shows it, in which no pass was shortened.
    """
    rank, world = evidence.ranks[0], evidence.ranks[0].connected_world
    is_whole = rank.end and not rank.error and not rank.of("enough")
    if world == 1 or not is_whole or evidence.hang or evidence.out_of_time:
        return
    if any(end["batches"] != end["whole"] for end in rank.of("pass end")):
        return
    for made in rank.of("schedule made"):
        own = [each for each in rank.of("schedule") if each["scheduler"] == made["scheduler"]]
        advanced = sum(each["advanced"] for each in own)
        if made["planned"] is None or advanced < LEAST:
            continue
        windows = [step["backwards"] for step in rank.steps(made["optimizer"])]
        window = max(set(windows), key=windows.count, default=1)
        ratio = made["planned"] / advanced
        if any(
            abs(ratio / each - 1) < 0.03 for each in (world, window, world * window) if each > 1
        ):
            sentence = "the run ends long before the schedule"
        elif abs(ratio * world - 1) < 0.03 and (made["name"] != COSINE or advanced > len(own)):
            sentence = "the schedule ends long before the run"
        else:
            continue
        finding = Finding(
            WARNING,
            "schedule",
            f"{made['name']} was created for {made['planned']} steps, but advances {advanced} "
            f"times: {sentence}.",
            "Count its optimizer steps: one per window of micro-batches, with the length of the "
            "divided loader. A schedule prepared by Accelerate advances once per process, so take "
            "the loader's length before accelerator.prepare.",
            PAGE,
        )
        for each in evidence.ranks:
            for event in each.of("schedule made"):
                if event["scheduler"] == made["scheduler"]:
                    finding.add_place(event["line"], each.number)
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
