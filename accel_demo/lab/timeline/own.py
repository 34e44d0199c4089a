"""Read what the observer has recorded about the steps of the reader's script."""

import math
import shlex
from pathlib import Path
from statistics import median

from accel_demo.errors import UserError, say
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.observation import (
    observe,
    processes_in_words,
    say_if_killed,
    too_few_steps,
)
from accel_demo.lab.observed.places import short_path
from accel_demo.lab.observed.ranks import Rank
from accel_demo.lab.timeline import merge
from accel_demo.lab.timeline.findings import findings_of
from accel_demo.lab.timeline.phases import rank_timelines
from accel_demo.lab.timeline.result import RankProfile, TimelineResult
from accel_demo.lab.timeline.straggler import STEPS_NEEDED
from accel_demo.observer.agent import TRACED_STEPS
from accel_demo.wording import byte_size, counted

LEAST_STEPS = 2


def measure_script(options) -> tuple[TimelineResult, list[dict], list[dict]]:
    """Profile the reader's command.

    Returns the result, our trace of each rank, and the last trace that the script itself has
    written on each rank, or an empty list if not all of them have one.
    """
    limits = {TRACED_STEPS: str(max(options.steps, STEPS_NEEDED))}
    limits["KINETO_LOG_LEVEL"] = "99"  # hides the profiler's log messages
    seen = observe(options, "timeline", limits, lambda evidence: read(evidence, options))
    return seen.content


def read(evidence: Evidence, options) -> tuple[TimelineResult, list[dict], list[dict]]:
    """Return what `measure_script` returns. Raises `UserError` if no steps were recorded."""
    say_if_killed(evidence)
    ranks = evidence.ranks
    own = own_traces_of(ranks)
    profiles = [profile_of(rank, trace) for rank, trace in zip(ranks, own, strict=True)]
    if not all(profile.trace for profile in profiles):
        raise too_few_steps(evidence)
    traces = merge.load(profiles)
    try:
        timelines, straggler = rank_timelines(profiles, traces, options.steps)
    except ValueError as error:
        raise UserError(str(error)) from None
    if len(timelines[0].steps) < STEPS_NEEDED:
        straggler = None
    result = TimelineResult(
        processes=profiles[0].processes,
        backend=profiles[0].backend,
        device=profiles[0].device,
        description=describe(options.command, profiles, len(ranks), len(timelines[0].steps)),
        settings={"command_line": options.command, "exit_code": evidence.exit_code},
        bucket_bytes=profiles[0].bucket_bytes,
        ranks=timelines,
        straggler=straggler,
        findings=findings_of(profiles, timelines, straggler),
    )
    found = [event for event in own if event]
    for event in found:
        say(f"found the script's own trace {short_path(event['path'])}")
    own_profiles = [RankProfile(e["trace"], 0, "", "", [], 0, {}) for e in found]
    return result, traces, merge.load(own_profiles) if len(found) == len(ranks) else []


def own_traces_of(ranks: list[Rank]) -> list[dict | None]:
    """Return the last trace that the script itself has written on each rank, if any.

    If some ranks have a trace of ours, it is the last one of the same steps, if there is one.
    """
    ours = [event["steps"] for rank in ranks for event in rank.of("traced") if event["trace"]]
    traces = [rank.of("own trace") for rank in ranks]
    common = [
        [each for each in own if each["steps"] <= min(ours, default=math.inf)] for own in traces
    ]
    return [next(reversed(early or own), None) for early, own in zip(common, traces, strict=True)]


def profile_of(rank: Rank, own: dict | None) -> RankProfile:
    """Return the profile of a rank. `trace` is "" if it has none with at least two steps.

    If the script's own profiler has left no time for ours, its trace is used.
    """
    events = rank.of("traced")
    event = next((each for each in events if each["trace"]), events[-1] if events else None)
    if event is None:
        return RankProfile("", 1, "", "", [], 0, {})
    trace = event["trace"] or (own["trace"] if own else "")
    if not Path(trace).is_file() or event["steps"] < LEAST_STEPS:
        trace = ""
    return RankProfile(
        trace=trace,
        processes=event["processes"],
        backend=event["backend"],
        device=event["device"],
        bucket_bytes=event["bucket_bytes"],
        clock_ahead_ns=0,  # all ranks run on this machine
        wall_ms={int(step): ms for step, ms in event["wall_ms"].items()},
        averages=median(event["averages"] or [0]),
        reads=[[*read, steps / len(event["wall_ms"])] for *read, steps in event["reads"]],
    )


def describe(command: list[str], profiles: list[RankProfile], seen: int, steps: int) -> str:
    """Describe the run in one line. `seen` is the number of processes that were started."""
    text = f"{processes_in_words(profiles[0].processes, seen)} on {profiles[0].device}"
    text += f" ({profiles[0].backend})" if profiles[0].backend else ""
    text += f": {shlex.join(command)}, {counted(steps, 'step')}"
    for sizes in profiles[0].bucket_bytes:
        text += f", {counted(len(sizes), 'bucket')} of {byte_size(sum(sizes))} in all"
    return text
