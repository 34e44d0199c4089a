"""What each rank does at each moment of a step, and how much of the all-reduce is hidden."""

import math
from statistics import median

from accel_demo.lab.timeline.spans import Spans, intersect, length, span_of, subtract, union
from accel_demo.lab.timeline.straggler import lateness, pieces_of, slow_rank

PHASES = ["data wait", "forward", "backward", "all-reduce", "optimizer", "idle"]
MARKED = ["data wait", "forward", "backward", "optimizer"]  # by recording.py
SHORTEST_WAIT_MS = 0.1  # less is the way from one operator to the next
ITEM_BYTES = {"float": 4, "Float": 4, "double": 8, "Double": 8, "long int": 8, "Long": 8}
ITEM_BYTES |= dict.fromkeys(("c10::BFloat16", "BFloat16", "c10::Half", "Half"), 2)
NOT_OF_A_STEP = ("gloo:barrier", "gloo:send", "gloo:recv")


def found_of(found_by_rank: list[dict], traces: list[dict], shown: int = 0) -> dict:
    """The ranks of one run, each with its steps and its bars, and a summary of each.

    `traces` are those of `merge.load`. With `shown`, only that many steps, the last ones,
    are told of; who is slow is told from all of them. Times are ms since the first of them began.
    """
    timelines = [Timeline(trace) for trace in traces]
    late = lateness(timelines)
    slowest, slower = slow_rank([pieces_of(timeline) for timeline in timelines])
    for timeline in timelines:
        timeline.steps = dict(list(timeline.steps.items())[-shown:])  # [-0:] is all of them
    start = min(step["ts"] for timeline in timelines for step in timeline.steps.values())
    ranks = []
    for rank, (found, timeline) in enumerate(zip(found_by_rank, timelines, strict=True)):
        steps = []
        for number, event in timeline.steps.items():
            span = [span_of(event)]
            phases = timeline.phases_in(span)
            communication = intersect(span, timeline.all_reduces)
            computing = intersect(span, phases["backward"])
            steps.append(
                {
                    "step": number,
                    "start_ms": event["ts"] - start,
                    "end_ms": event["ts"] + event["dur"] - start,
                    "wall_ms": found["wall_ms"][number],
                    "phases_ms": {phase: length(phases[phase]) for phase in PHASES},
                    "all_reduce_ms": length(communication),
                    "hidden_ms": length(intersect(communication, computing)),
                    "exposed_ms": length(intersect(communication, phases["all-reduce"])),
                }
            )
        bars = timeline.bars(start)
        ahead = found["clock_ahead_ns"] / 1e6
        ranks.append({"rank": rank, "clock_offset_ms": ahead, "steps": steps, "bars": bars})
    summary = [summary_of(*each) for each in zip(ranks, late, slower, strict=True)]
    straggler = None if slowest is None else {"rank": slowest, "slower_ms": slower[slowest]}
    return {"ranks": ranks, "summary": summary, "straggler": straggler}


def summary_of(rank: dict, late_ms: float, slower_ms: float) -> dict:
    """Medians over the steps of a rank."""
    steps = rank["steps"]
    total = sum(step["all_reduce_ms"] for step in steps)
    return {
        "rank": rank["rank"],
        "wall_ms": median(step["wall_ms"] for step in steps),
        "phases_ms": {p: median(step["phases_ms"][p] for step in steps) for p in PHASES},
        "all_reduce_ms": median(step["all_reduce_ms"] for step in steps),
        "exposed_ms": median(step["exposed_ms"] for step in steps),
        "hidden_share": sum(step["hidden_ms"] for step in steps) / total if total else 0.0,
        "late_ms": late_ms,
        "slower_ms": slower_ms,
    }


class Timeline:
    """The events of one rank, sorted by what they tell of a step.

    On a CPU a phase is what the main thread does between two marks, but for the moments of forward
    and backward in which it does nothing while something is being sent: there it waits. On a GPU
    the host is far ahead; a phase is when the kernels run that were launched in it, and waiting is
    when only NCCL's are running.
    """

    def __init__(self, trace: dict):
        events = sorted((e for e in trace["traceEvents"] if e["ph"] == "X"), key=lambda e: e["ts"])
        steps = [e for e in events if e["cat"] == "user_annotation" and is_step(e["name"])]
        self.steps = {int(event["name"].removeprefix("step ")): event for event in steps}
        thread = steps[0]["pid"], steps[0]["tid"]
        on_main = [e for e in events if (e["pid"], e["tid"]) == thread]
        marks = {phase: [] for phase in MARKED}
        for event in on_main:
            if event["name"] in marks and event["cat"] == "user_annotation":
                marks[event["name"]].append(span_of(event))
        kernels = [e for e in events if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
        if kernels:
            self._of_kernels(events, kernels, marks)
        else:
            self._of_threads(events, on_main, marks)
        self.all_reduces = union(
            [span_of(e) for e in self.communication if "reduce" in e["name"].lower()]
        )

    def _of_threads(self, events: list[dict], on_main: list[dict], marks: dict) -> None:
        self.communication = [
            e for e in events if e["name"].startswith("gloo:") and e["name"] not in NOT_OF_A_STEP
        ]
        self.operators = top_level([e for e in on_main if e["cat"] == "cpu_op"])
        self.arrivals = [
            e for e in on_main if e["name"] in ("c10d::allreduce_", "c10d::broadcast_")
        ]
        busy = union([span_of(event) for event in self.operators])
        sent = union([span_of(event) for event in self.communication])
        within = union([*marks["forward"], *marks["backward"]])
        waits = intersect(subtract(within, busy), sent)
        waits = [(start, end) for start, end in waits if end - start >= SHORTEST_WAIT_MS]
        self.layers = [("all-reduce", waits), *((phase, marks[phase]) for phase in MARKED)]

    def _of_kernels(self, events: list[dict], kernels: list[dict], marks: dict) -> None:
        launches = {
            e["args"]["correlation"]: e["ts"]
            for e in events
            if e["cat"] in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
        }
        self.communication = [e for e in kernels if e["name"].startswith("nccl")]
        self.operators = [e for e in kernels if not e["name"].startswith("nccl")]
        self.arrivals = self.communication
        computed = {phase: [] for phase in MARKED}
        for event in self.operators:
            launched_at = launches.get(event["args"].get("correlation"), event["ts"])
            for phase, spans in marks.items():
                if any(start <= launched_at < end for start, end in spans):
                    computed[phase].append(span_of(event))
        sent = union([span_of(event) for event in self.communication])
        computed = {phase: union(spans) for phase, spans in computed.items()}
        self.layers = [*computed.items(), ("all-reduce", sent), ("data wait", marks["data wait"])]

    def phases_in(self, step: Spans) -> dict[str, Spans]:
        """Each moment of the step in one phase: the first of the layers that has it, or idle."""
        left, phases = step, {phase: [] for phase in PHASES}
        for phase, spans in self.layers:
            phases[phase] = union([*phases[phase], *intersect(left, spans)])
            left = subtract(left, spans)
        return {**phases, "idle": left}

    def arrivals_in(self, number: int) -> list[float]:
        """When this rank came to each collective of a step."""
        start, end = span_of(self.steps[number])
        return [event["ts"] for event in self.arrivals if start <= event["ts"] < end]

    def bars(self, origin: float) -> list[dict]:
        """What is drawn: the phases of each step in one lane, what is sent in another."""
        drawn = []
        for number, event in self.steps.items():
            step = span_of(event)
            for phase, spans in self.phases_in([step]).items():
                drawn += [("compute", phase, phase, number, *span, None) for span in spans]
            for sent in self.communication:
                if step[0] <= sent["ts"] < step[1]:
                    lane = ("communication", "all-reduce", sent["name"], number)
                    drawn.append((*lane, *span_of(sent), bytes_of(sent)))
        bars = [
            {
                "lane": lane,
                "phase": phase,
                "name": name,
                "step": step,
                "start_ms": start - origin,
                "end_ms": end - origin,
                "bytes": size,
            }
            for lane, phase, name, step, start, end, size in drawn
        ]
        return sorted(bars, key=lambda bar: (bar["lane"] != "compute", bar["start_ms"]))


def is_step(name: str) -> bool:
    return name.startswith("step ") and name.removeprefix("step ").isdigit()


def bytes_of(event: dict) -> int | None:
    """The size of what is sent, where the trace tells."""
    arguments = event.get("args", {})
    if "In msg nelems" in arguments:  # of NCCL's kernels
        numbers, kind = arguments["In msg nelems"], arguments.get("dtype")
    elif arguments.get("Input Dims"):
        numbers, kind = math.prod(arguments["Input Dims"][0]), arguments["Input type"][0]
    else:
        return None
    return numbers * ITEM_BYTES[kind] if kind in ITEM_BYTES else None


def top_level(events: list[dict]) -> list[dict]:
    """Those that are not inside another one. The events are of one thread, in their order."""
    outer, end = [], -math.inf
    for event in events:
        if event["ts"] >= end:
            outer.append(event)
            end = event["ts"] + event["dur"]
    return outer
