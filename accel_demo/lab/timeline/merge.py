"""One clock for the traces of all ranks, and one trace made of them.

A trace of torch.profiler has its times in microseconds since its `baseTimeNanoseconds`, by the
clock of its machine. Clocks of two machines differ, so each rank measures how far ahead of rank 0's
its own clock is, and its times are moved back by that much.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

ROUND_TRIPS = 100


def clock_ahead(group: dist.ProcessGroup, read: Callable[[], int] = time.time_ns) -> int:
    """Nanoseconds by which this rank's clock is ahead of rank 0's; all ranks are to call it.

    Rank 0 asks each other rank for its time again and again. The answer belongs to the middle
    between asking and hearing it, give or take half the round trip: the quickest one tells most.
    `read` gives the clock, in nanoseconds. `group` is of gloo: clocks are read on the CPU.
    Source: section 8 of https://www.rfc-editor.org/rfc/rfc5905 (NTP)
    """
    rank = dist.get_rank()
    message = torch.zeros(1, dtype=torch.long)
    for other in range(1, dist.get_world_size()):
        if rank == other:
            for _ in range(ROUND_TRIPS):
                dist.recv(message, 0, group=group)
                dist.send(torch.tensor([read()]), 0, group=group)
            dist.recv(message, 0, group=group)
        elif rank == 0:
            answers = []
            for _ in range(ROUND_TRIPS):
                asked_at = read()
                dist.send(message, other, group=group)
                dist.recv(message, other, group=group)
                heard_at = read()
                ahead = message.item() - (asked_at + heard_at) // 2
                answers.append((heard_at - asked_at, ahead))
            dist.send(torch.tensor([min(answers)[1]]), other, group=group)
    return int(message) if rank > 0 else 0


def shift(trace: Path, nanoseconds: int) -> None:
    """Rewrite a trace as a clock that is this far ahead would have written it."""
    content = json.loads(trace.read_text())
    content["baseTimeNanoseconds"] += nanoseconds
    trace.write_text(json.dumps(content))


def load(found_by_rank: list[dict]) -> list[dict]:
    """The trace of each rank, its events on rank 0's clock; "ts" and "dur" of them are in ms.

    `found_by_rank` is what `recording.profile_runs` gives for one run, by rank. Time 0 is the
    same for all of them.
    """
    traces = [json.loads(Path(found["trace"]).read_text()) for found in found_by_rank]
    bases = [
        trace["baseTimeNanoseconds"] - found["clock_ahead_ns"]
        for trace, found in zip(traces, found_by_rank, strict=True)
    ]
    for trace, base in zip(traces, bases, strict=True):
        shift_ms = (base - bases[0]) / 1e6
        for event in trace["traceEvents"]:
            event["ts"] = event["ts"] / 1e3 + shift_ms
            if "dur" in event:
                event["dur"] /= 1e3
    return traces


def merged(traces: list[dict]) -> dict:
    """One trace for https://ui.perfetto.dev and chrome://tracing: a process for each rank.

    Source: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    by_rank = [
        [event for event in trace["traceEvents"] if isinstance(event.get("pid"), int)]
        for trace in traces  # other pids are of the profiler itself
    ]
    first = min(event["ts"] for own in by_rank for event in own if event["ph"] == "X")
    events = []
    for rank, own in enumerate(by_rank):
        main = next(e["pid"] for e in own if e.get("cat") == "user_annotation")
        used = {event["pid"] for event in own if event["ph"] == "X"} - {main}
        numbers = {pid: 1000 * rank + n for n, pid in enumerate([main, *sorted(used)])}
        for pid, number in numbers.items():
            name = f"rank {rank}" if pid == main else f"rank {rank}, GPU {pid}"
            for what, value in (("name", name), ("sort_index", number)):
                about = {"ph": "M", "name": f"process_{what}", "pid": number, "tid": 0}
                events.append({**about, "args": {what: value}})
        for event in own:
            if event["pid"] not in numbers or event["name"].startswith("process_"):
                continue
            event = {**event, "pid": numbers[event["pid"]]}
            event["ts"] = round(max(0.0, event["ts"] - first) * 1e3, 3)
            if "dur" in event:
                event["dur"] = round(event["dur"] * 1e3, 3)
            if "id" in event:  # of an arrow from one event to another: unique in all ranks
                event["id"] = event["id"] * len(traces) + rank
            events.append(event)
    return {"displayTimeUnit": "ms", "traceEvents": events}
