"""Divide each rank's steps into phases, and measure the all-reduce time hidden under backward."""

import math
import re
from dataclasses import replace
from statistics import median

from accel_demo.lab.timeline.result import (
    Bar,
    ProfiledStep,
    RankProfile,
    RankTimeline,
    place_in_rows,
)
from accel_demo.lab.timeline.spans import Spans, intersect, length, span_of, subtract, union
from accel_demo.lab.timeline.straggler import lateness, operator_times, slow_rank

# "rank wait": this rank waits, and another one has not started the same collective yet. "message
# wait": all ranks have started all that this one has, and it waits until the messages have arrived.
WAITS = ["rank wait", "message wait"]
PHASES = ["data wait", "forward", "backward", *WAITS, "optimizer", "other"]
MARKED = ["data wait", "forward", "backward", "optimizer"]  # the phases that tracing.py marks
SHORTEST_WAIT_MS = 0.1  # a shorter pause is overhead between two operators, not a wait
ITEM_BYTES = {"float": 4, "Float": 4, "double": 8, "Double": 8, "long int": 8, "Long": 8}
ITEM_BYTES |= dict.fromkeys(("c10::BFloat16", "BFloat16", "c10::Half", "Half"), 2)


def rank_timelines(
    profiles: list[RankProfile], traces: list[dict], shown_steps: int = 0
) -> tuple[list[RankTimeline], int | None]:
    """Return the timeline of each rank, and the number of the slow rank (None if no rank is slow).

    `traces` comes from `merge.load`. The lanes contain only `shown_steps` typical steps, or all
    steps if `shown_steps` is 0.
    """
    rank_traces = [
        RankTrace(trace, profile.wall_ms) for profile, trace in zip(profiles, traces, strict=True)
    ]
    common = set.intersection(*(set(trace.steps) for trace in rank_traces))
    if not common:
        raise ValueError("the ranks have no complete step in common")
    for trace in rank_traces:
        trace.steps = {number: trace.steps[number] for number in sorted(common)}
    divide_waits(rank_traces)
    late_ms = lateness(rank_traces)
    straggler, slower_ms = slow_rank([operator_times(trace) for trace in rank_traces])
    shown = typical_steps(rank_traces, shown_steps or len(common))
    start = min(trace.steps[shown[0]]["ts"] for trace in rank_traces)
    timelines = []
    for rank, (profile, trace) in enumerate(zip(profiles, rank_traces, strict=True)):
        steps, lanes = trace.steps_and_lanes(start, profile.wall_ms, shown)
        total = sum(step.all_reduce_ms for step in steps)
        timeline = RankTimeline(
            rank=rank,
            clock_ahead_ms=profile.clock_ahead_ns / 1e6,
            wall_ms=median(step.wall_ms for step in steps),
            phases_ms={p: median(step.phases_ms[p] for step in steps) for p in PHASES},
            all_reduce_ms=median(step.all_reduce_ms for step in steps),
            exposed_ms=median(step.exposed_ms for step in steps),
            hidden_share=sum(step.hidden_ms for step in steps) / total if total else 0.0,
            late_ms=late_ms[rank],
            slower_ms=slower_ms[rank],
            steps=steps,
            lanes=lanes,
        )
        timelines.append(timeline)
    return timelines, straggler


def typical_steps(traces: list["RankTrace"], count: int) -> list[int]:
    """Return the `count` consecutive steps whose times are closest to the median, on all ranks."""
    numbers = list(traces[0].steps)
    usual = [median(step["dur"] for step in trace.steps.values()) for trace in traces]

    def distance(first: int) -> float:
        return sum(
            abs(trace.steps[number]["dur"] - duration)
            for trace, duration in zip(traces, usual, strict=True)
            for number in numbers[first : first + count]
        )

    first = min(range(max(1, len(numbers) - count + 1)), key=distance)
    return numbers[first : first + count]


class RankTrace:
    """The events of one rank, grouped by their role in a step.

    On the CPU, a phase is the time between two marks on the main thread. The main thread is waiting
    if it is idle in forward or backward while a collective runs. A GPU runs kernels later than the
    CPU launches them, so on a GPU, a phase is the time in which kernels run that were launched
    between its marks. The GPU is waiting while only NCCL kernels run.

    `steps` contains only the steps in `wall_ms`: a script may end, or evaluate, in a step.
    """

    def __init__(self, trace: dict, wall_ms: dict[int, float]):
        events = sorted((e for e in trace["traceEvents"] if e["ph"] == "X"), key=lambda e: e["ts"])
        annotations = [e for e in events if e["cat"] == "user_annotation"]
        steps = [e for e in annotations if re.fullmatch(r"step \d+", e["name"])]
        self.steps = {int(event["name"].removeprefix("step ")): event for event in steps}
        self.steps = {step: event for step, event in self.steps.items() if step in wall_ms}
        self.left_out_ms: dict[int, float] = {}  # of a step, because of an evaluation
        self.pending: Spans = []  # when this rank has started a collective, but not each other rank
        thread = (steps[0]["pid"], steps[0]["tid"]) if steps else None
        on_main = [e for e in events if (e["pid"], e["tid"]) == thread]
        marks: dict[str, Spans] = {phase: [] for phase in MARKED}
        for event in annotations:
            if event["name"] in marks and (event["pid"], event["tid"]) == thread:
                marks[event["name"]].append(span_of(event))
        self._begin_after_evaluations(annotations)
        kernels = [e for e in events if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
        self.layers: list[tuple[str, Spans]]  # (phase, its spans); earlier layers take precedence
        if kernels:
            self._read_kernels(events, kernels, marks)
        else:
            self._read_threads(events, on_main, marks)
        self.backwards = sorted(marks["backward"])
        self.all_reduces = union(
            span_of(e) for e in self.communication if "reduce" in e["name"].lower()
        )

    def _begin_after_evaluations(self, annotations: list[dict]) -> None:
        """Let each step begin after the evaluation in it, if there is one.

        An evaluation is marked, or it calls the model for one batch after the other without a
        backward pass in between.
        """
        marks = [each for each in annotations if each["name"] in (*MARKED, "evaluation")]
        for number, step in self.steps.items():
            start, end = span_of(step)
            begin, forward, is_read = start, None, False
            for mark in marks:
                if not start <= mark["ts"] < end:
                    continue
                name = mark["name"]
                if name == "evaluation":
                    begin = span_of(mark)[1]
                elif name == "forward" and forward is not None and is_read:
                    begin = span_of(forward)[1]
                if name in ("forward", "backward", "evaluation"):
                    forward, is_read = (mark if name == "forward" else None), False
                is_read |= name == "data wait"
            if begin > start:
                self.steps[number] = {**step, "ts": begin, "dur": end - begin}
                self.left_out_ms[number] = begin - start

    def _read_threads(self, events: list[dict], on_main: list[dict], marks: dict) -> None:
        self.communication = [e for e in events if e["name"].startswith("gloo:")]
        self.operators = top_level([e for e in on_main if e["cat"] == "cpu_op"])
        self.arrivals = [e for e in on_main if e["name"].startswith("c10d::")]
        self.reduces_begun = [e["ts"] for e in self.arrivals if "reduce" in e["name"]]
        busy = union(span_of(event) for event in [*self.operators, *self.arrivals])
        sending = union(span_of(event) for event in self.communication)
        steps = union(span_of(event) for event in self.steps.values())
        pauses = subtract(subtract(steps, marks["data wait"]), busy)
        waits = intersect(pauses, sending)
        self.waits = [(start, end) for start, end in waits if end - start >= SHORTEST_WAIT_MS]
        self.layers = [("wait", self.waits), *((phase, marks[phase]) for phase in MARKED)]

    def _read_kernels(self, events: list[dict], kernels: list[dict], marks: dict) -> None:
        launches = {
            e["args"]["correlation"]: e["ts"]
            for e in events
            if e["cat"] in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
        }
        self.communication = [e for e in kernels if e["name"].startswith("nccl")]
        self.operators = [e for e in kernels if not e["name"].startswith("nccl")]
        self.arrivals = self.communication
        self.reduces_begun = [
            launches.get(e["args"].get("correlation"), e["ts"])
            for e in self.communication
            if "Reduce" in e["name"]
        ]
        computed: dict[str, Spans] = {phase: [] for phase in MARKED}
        for event in self.operators:
            launched_at = launches.get(event["args"].get("correlation"), event["ts"])
            for phase, spans in marks.items():
                if any(start <= launched_at < end for start, end in spans):
                    computed[phase].append(span_of(event))
        self.waits = union(span_of(event) for event in self.communication)
        self.layers = [(phase, union(spans)) for phase, spans in computed.items()]
        self.layers += [("wait", self.waits), ("data wait", marks["data wait"])]

    def phases_in(self, step: Spans) -> dict[str, Spans]:
        """Return the spans of each phase in the step. Time that no layer covers is "other"."""
        rest, phases = step, {phase: [] for phase in PHASES}
        for phase, spans in self.layers:
            covered = intersect(rest, spans)
            if phase == "wait":
                phases["rank wait"] = intersect(covered, self.pending)
                phases["message wait"] = subtract(covered, self.pending)
            else:
                phases[phase] = union([*phases[phase], *covered])
            rest = subtract(rest, spans)
        return {**phases, "other": rest}

    def arrivals_in(self, step: int) -> list[float]:
        """Return the times at which this rank started the collectives of a step."""
        return [event["ts"] for event in self._in(step, self.arrivals)]

    def _in(self, step: int, events: list[dict]) -> list[dict]:
        start, end = span_of(self.steps[step])
        return [event for event in events if start <= event["ts"] < end]

    def steps_and_lanes(
        self, origin: float, wall_ms: dict[int, float], shown: list[int]
    ) -> tuple[list[ProfiledStep], dict[str, list[Bar]]]:
        """Return the steps, and the bars of both lanes for those in `shown`.

        All times are relative to `origin`.
        """
        steps, activity, sending = [], [], []
        for number, event in self.steps.items():
            start, end = span_of(event)
            phases = self.phases_in([(start, end)])
            all_reduces = intersect([(start, end)], self.all_reduces)
            step = ProfiledStep(
                number=number,
                start_ms=start - origin,
                end_ms=end - origin,
                wall_ms=wall_ms[number] - self.left_out_ms.get(number, 0.0),
                phases_ms={phase: length(phases[phase]) for phase in PHASES},
                all_reduce_ms=length(all_reduces),
                hidden_ms=length(intersect(all_reduces, phases["backward"])),
                exposed_ms=sum(length(intersect(all_reduces, phases[wait])) for wait in WAITS),
                sending_backwards=self._sending_backwards(start, end),
            )
            steps.append(step)
            if number not in shown:
                continue
            for phase, spans in phases.items():
                for begin, stop in spans:
                    activity.append(Bar(phase, phase, number, begin - origin, stop - origin))
            for sent in self.communication:
                begin, stop = span_of(sent)
                if start <= begin < end:
                    bar = Bar("collective", sent["name"], number, begin - origin, stop - origin)
                    sending.append(replace(bar, bytes_sent=bytes_of(sent)))
        return steps, {"activity": place_in_rows(activity), "collectives": place_in_rows(sending)}

    def _sending_backwards(self, start: float, end: float) -> int:
        return sum(
            any(begin <= time < stop for time in self.reduces_begun)
            for begin, stop in self.backwards
            if start <= begin < end
        )


def divide_waits(traces: list[RankTrace]) -> None:
    """Find out when the ranks wait for each other, and when they wait for messages.

    If the ranks start different numbers of collectives, or some in other threads, this is unknown:
    then each wait counts as one for messages.
    """
    for step in traces[0].steps:
        arrivals = [trace.arrivals_in(step) for trace in traces]
        if len({len(times) for times in arrivals}) == 1:
            started = [max(times) for times in zip(*arrivals, strict=True)]
            for trace, own in zip(traces, arrivals, strict=True):
                trace.pending += zip(own, started, strict=True)
    for trace in traces:
        trace.pending = union(trace.pending)


def bytes_of(event: dict) -> int | None:
    """Return how many bytes a collective sends, or None if the trace does not contain this."""
    arguments = event.get("args", {})
    if "In msg nelems" in arguments:  # an NCCL kernel
        count, dtype = arguments["In msg nelems"], arguments.get("dtype")
    elif arguments.get("Input Dims"):
        count, dtype = math.prod(arguments["Input Dims"][0]), arguments["Input type"][0]
    else:
        return None
    return count * ITEM_BYTES[dtype] if dtype in ITEM_BYTES else None


def top_level(events: list[dict]) -> list[dict]:
    """Return the outermost events. `events` must be from one thread, and sorted by start time."""
    outer, end = [], -math.inf
    for event in events:
        if event["ts"] >= end:
            outer.append(event)
            end = event["ts"] + event["dur"]
    return outer
