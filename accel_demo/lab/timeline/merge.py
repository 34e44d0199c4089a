"""Convert the times in all traces to rank 0's clock, and merge the traces into one.

torch.profiler writes times as microseconds since the trace's `baseTimeNanoseconds`, which is a time
on the machine's clock. Two machines' clocks differ, so each rank measures how far its clock is
ahead of rank 0's clock (`clocks.py`), and we subtract this offset from all times in its trace.
"""

import json
from pathlib import Path

from accel_demo.lab.timeline.result import RankProfile


def load(profiles: list[RankProfile]) -> list[dict]:
    """Load the trace of each rank, and convert "ts" and "dur" to milliseconds on rank 0's clock."""
    traces = [json.loads(Path(profile.trace).read_text(encoding="utf-8")) for profile in profiles]
    start_ns = traces[0]["baseTimeNanoseconds"]
    for profile, trace in zip(profiles, traces, strict=True):
        shift_ms = (trace["baseTimeNanoseconds"] - profile.clock_ahead_ns - start_ns) / 1e6
        for event in trace["traceEvents"]:
            event["ts"] = event["ts"] / 1e3 + shift_ms
            if "dur" in event:
                event["dur"] /= 1e3
    return traces


def merged(traces: list[dict]) -> dict:
    """Return one trace of all ranks for https://ui.perfetto.dev and chrome://tracing.

    Source: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    events_by_rank = [
        [event for event in trace["traceEvents"] if isinstance(event.get("pid"), int)]
        for trace in traces  # pids that are not integers belong to the profiler itself
    ]
    first = min(event["ts"] for events in events_by_rank for event in events if event["ph"] == "X")
    merged_events = []
    for rank, events in enumerate(events_by_rank):
        main = next(event["pid"] for event in events if event.get("cat") == "user_annotation")
        used = {event["pid"] for event in events if event["ph"] == "X"} - {main}
        numbers = {pid: 1000 * rank + n for n, pid in enumerate([main, *sorted(used)])}
        for pid, number in numbers.items():
            name = f"rank {rank}" if pid == main else f"rank {rank}, GPU {pid}"
            for key, value in (("name", name), ("sort_index", number)):
                event = {"ph": "M", "name": f"process_{key}", "pid": number, "tid": 0}
                merged_events.append({**event, "args": {key: value}})
        for event in events:
            if event["pid"] not in numbers or event["name"].startswith("process_"):
                continue
            event = {**event, "pid": numbers[event["pid"]]}
            event["ts"] = round(max(0.0, event["ts"] - first) * 1e3, 3)
            if "dur" in event:
                event["dur"] = round(event["dur"] * 1e3, 3)
            if "id" in event:  # equal ids connect events, so ids must differ between ranks
                event["id"] = event["id"] * len(traces) + rank
            merged_events.append(event)
    return {"displayTimeUnit": "ms", "traceEvents": merged_events}
