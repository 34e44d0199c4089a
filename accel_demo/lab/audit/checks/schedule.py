"""Does a learning rate schedule advance once per optimizer step, or once per epoch?"""

import re
from collections.abc import Iterator
from linecache import getlines

from accel_demo.lab.audit.result import ERROR, NOTE, WARNING, Finding
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.places import NotChecked, text_of
from accel_demo.lab.observed.ranks import Rank

PAGE = "31_batch_and_learning_rate"
COSINE = "CosineAnnealingLR"  # may continue after its end: the rate then rises again
LEAST = 8  # steps without an advance that are suspicious


def check(evidence: Evidence) -> Iterator[Finding]:
    yield from _never_advanced(evidence)
    yield from _planned_for_another_length(evidence)
    if not any(evidence.counts("schedule")):
        if any(_rate_changes(rank.of("step")) for rank in evidence.ranks):
            raise NotChecked("no schedule of PyTorch changes the learning rate in its own step()")
        raise NotChecked(
            "no learning rate schedule advanced"
            if any(evidence.counts("schedule made"))
            else "the script has no learning rate schedule"
        )
    rank = next(rank for rank in evidence.ranks if rank.of("schedule"))
    compared = False
    for scheduler in sorted({event["scheduler"] for event in rank.of("schedule")}):
        events = [each for each in rank.of("schedule") if each["scheduler"] == scheduler]
        windows = _calls_between_steps(rank, scheduler, events[0]["optimizer"])
        advancing = [calls for calls in windows if calls]
        regular = [calls for calls in advancing if calls > 1]
        compared |= len(advancing) > 1
        if len(advancing) > 1 and len(regular) >= 0.6 * len(advancing):
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
            yield finding.add_places_of(evidence.ranks, "schedule", scheduler=scheduler)
    if not compared:
        raise NotChecked("no learning rate schedule advanced after two different steps")


def why_length_is_unknown(evidence: Evidence) -> str | None:
    """Return why the lengths of the schedules that have advanced are unknown, or None."""
    if not any(evidence.counts("schedule")):
        return None
    if not _is_whole(evidence):
        return "only a complete run shows them (--steps 0 --batches 0)"
    made = evidence.ranks[0].of("schedule made")
    endless = [each["name"] for each in made if each["planned"] is None]
    return f"a {endless[0]} has no known end" if endless else None


def _never_advanced(evidence: Evidence) -> Iterator[Finding]:
    """Report schedules whose `step` was called neither after a batch nor after an epoch."""
    rank = evidence.ranks[0]
    advanced = {event["optimizer"] for event in rank.of("schedule")}
    epochs = max((len(passes) for passes in rank.training_passes.values()), default=0)
    for made in rank.of("schedule made"):
        steps = rank.steps(made["optimizer"])
        if made["optimizer"] in advanced or len(steps) < LEAST or epochs < 3:
            continue
        if _rate_changes(steps) or _may_advance_later(evidence, made):
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
        yield finding.add_places_of(evidence.ranks, "schedule made", scheduler=made["scheduler"])


def _rate_changes(steps: list[dict]) -> bool:
    """Return True if the steps of an optimizer have different learning rates."""
    rates: dict[int, set] = {}
    for step in steps:
        rate = str([group.get("lr") for group in step["settings"]])
        rates.setdefault(step["optimizer"], set()).add(rate)
    return any(len(each) > 1 for each in rates.values())


def _may_advance_later(evidence: Evidence, made: dict) -> bool:
    """Return True if the run was cut short, and the script calls `step` of a schedule."""
    if made["line"] is None or _is_whole(evidence):
        return False
    name = re.match(r"([\w.]+)\s*=", text_of(made["line"]))
    call = rf"[^#]*\b({re.escape(name[1])}|\w*sched\w*)\.step\(" if name else r"[^#]*\.step\("
    lines = [event["line"] for event in evidence.ranks[0].of("backward", "step")] + [made["line"]]
    files = {line[0] for line in lines if line}
    return any(re.match(call, line) for file in files for line in getlines(file))


def _is_whole(evidence: Evidence) -> bool:
    """Return True if the script ran to its end, and no pass was shortened."""
    rank = evidence.ranks[0]
    return (
        bool(rank.end and not rank.error and not rank.of("enough"))
        and not (evidence.hang or evidence.out_of_time)
        and all(end["batches"] == end["whole"] for end in rank.of("pass end"))
    )


def _planned_for_another_length(evidence: Evidence) -> Iterator[Finding]:
    """Report schedules whose length is wrong by the number of processes or micro-batches.

    Only a whole run shows it. It may have resumed an earlier one, or end early on purpose.
    """
    rank, world = evidence.ranks[0], evidence.ranks[0].connected_world
    if world == 1 or not _is_whole(evidence):
        return
    for made in rank.of("schedule made"):
        own = [each for each in rank.of("schedule") if each["scheduler"] == made["scheduler"]]
        advanced = sum(each["advanced"] for each in own)
        if made["planned"] is None or advanced < LEAST:
            continue
        windows = [step["backwards"] for step in rank.steps(made["optimizer"])]
        window = max(set(windows), key=windows.count, default=1)
        ratio = made["planned"] / max(own[-1]["position"], 1)
        if any(
            abs(ratio / each - 1) < 0.03 for each in (world, window, world * window) if each > 1
        ):
            verdict, sentence = NOTE, "the run ends long before the schedule"
        elif abs(ratio * world - 1) < 0.03 and (made["name"] != COSINE or advanced > len(own)):
            verdict, sentence = WARNING, "the schedule ends long before the run"
        else:
            continue
        if (at_once := max(each["advanced"] for each in own)) > 1:  # Accelerate's wrapper
            cure = f"Each call of its step() advances it {at_once} times, because Accelerate "
            cure += "prepared it: write Accelerator(step_scheduler_with_optimizer=False) and call "
            cure += "it only if accelerator.sync_gradients, or create it for "
            cure += f"{at_once} times the optimizer steps of a process."
        else:
            cure = "Create it for the number of calls of its step() in one process, which reads "
            cure += "only its part of the data, and may combine several batches for a step."
        finding = Finding(
            verdict,
            "schedule",
            f"{made['name']} was created for {made['planned']} steps, but is at step "
            f"{own[-1]['position']} at the end: {sentence}.",
            cure,
            PAGE,
        )
        yield finding.add_places_of(evidence.ranks, "schedule made", scheduler=made["scheduler"])


def _calls_between_steps(rank: Rank, scheduler: int, optimizer: int) -> list[int]:
    """Return how often the schedule was called after each optimizer step and before the next."""
    calls: list[int] = []
    for event in rank.events:
        if event["kind"] == "step" and event["optimizer"] == optimizer:
            calls.append(0)
        elif event["kind"] == "schedule" and event["scheduler"] == scheduler and calls:
            calls[-1] += 1
    return calls
