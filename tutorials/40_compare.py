"""Compare the traces that torch.profiler has written on each rank, and merge them into one.

python tutorials/40_compare.py runs/profile      # a folder with one trace per rank

The table shows milliseconds per step, as medians over the steps that all ranks have recorded. The
merged trace is for https://ui.perfetto.dev. The clocks of two machines differ, so all ranks must
have run on one machine.
"""

import gzip
import json
import re
from pathlib import Path
from statistics import median

from accel_demo.errors import UserError, one_line_errors
from accel_demo.options import Parser
from accel_demo.show import table

STEP = r"ProfilerStep#\d+"
DATA = r"enumerate\(DataLoader\)#.*"
ALL_REDUCE = r"gloo:all_reduce|ncclDevKernel_AllReduce.*"  # on a CPU, and on a GPU
HEAD = ["rank", "data wait", "starts its last all-reduce later by", "which takes", "step"]


def load(folder: Path) -> dict[int, list[dict]]:
    """Return {rank: events with a duration}, in order. "ts" and "dur" are in ms on one clock."""
    traces = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    if not all("distributedInfo" in trace for trace in traces):
        raise UserError(f"{folder} contains a trace that was not recorded in connected processes")
    origin = min((trace["baseTimeNanoseconds"] for trace in traces), default=0)
    ranks = {}
    for trace in traces:
        rank, start = trace["distributedInfo"]["rank"], trace["baseTimeNanoseconds"] - origin
        if rank in ranks:
            raise UserError(f"{folder} contains two traces of rank {rank}. Delete the old ones.")
        ranks[rank] = [
            {**event, "ts": event["ts"] / 1e3 + start / 1e6, "dur": event["dur"] / 1e3}
            for event in trace["traceEvents"]
            # The profiler's own events have a name as "pid". A GPU's marks are left out, too.
            if isinstance(event["pid"], int) and event["ph"] == "X"
            if event.get("cat") != "gpu_user_annotation"
        ]
    for events in ranks.values():
        events.sort(key=lambda event: (event["ts"], -event["dur"]))  # the outer one first
    return dict(sorted(ranks.items()))


def compare(ranks: dict[int, list[dict]]) -> list[list]:
    """Return the rows of the table."""
    steps = {rank: steps_of(events) for rank, events in ranks.items()}
    common = set.intersection(*(set(of_rank) for of_rank in steps.values()))
    if not common:
        raise UserError("the ranks have no step with an all-reduce in common")
    first = {step: min(of_rank[step]["start"] for of_rank in steps.values()) for step in common}
    rows = []
    for rank, of_rank in steps.items():
        late = median(of_rank[step]["start"] - first[step] for step in common)
        data, all_reduce, step = (
            median(of_rank[step][what] for step in common)
            for what in ("data", "all-reduce", "step")
        )
        rows.append([rank, *(round(ms, 1) for ms in (data, late, all_reduce, step))])
    return rows


def steps_of(events: list[dict]) -> dict[str, dict[str, float]]:
    """Return the times in each step that has an all-reduce."""
    steps = {}
    for step in named(STEP, events):
        within = [e for e in events if step["ts"] <= e["ts"] < step["ts"] + step["dur"]]
        if all_reduces := named(ALL_REDUCE, within):
            steps[step["name"]] = {
                "data": sum(event["dur"] for event in named(DATA, within)),
                "start": all_reduces[-1]["ts"],
                "all-reduce": all_reduces[-1]["dur"],
                "step": step["dur"],
            }
    return steps


def named(pattern: str, events: list[dict]) -> list[dict]:
    return [event for event in events if re.fullmatch(pattern, event["name"])]


def merged(ranks: dict[int, list[dict]]) -> dict:
    """Return one trace. Each rank is a process in it, and all-reduces have their own rows."""
    merged_events, origin = [], min(events[0]["ts"] for events in ranks.values())
    for rank, events in ranks.items():
        rows: list[tuple[str, list[int]]] = []  # (name, ends of its events that are still running)
        for event in events:
            start, end = (
                round(1e6 * (time - origin)) for time in (event["ts"], event["ts"] + event["dur"])
            )  # in ns
            is_sent = re.fullmatch(ALL_REDUCE, event["name"])
            name = "all-reduces" if is_sent else f"thread {event['tid']}"
            row, end = place(rows, name, start, end)
            times = {"ts": start / 1e3, "dur": (end - start) / 1e3}  # in µs
            kept = {key: event[key] for key in ("ph", "cat", "name") if key in event}
            merged_events.append({**kept, "pid": rank, "tid": row + 1, **times})
        labels = [("process_name", 0, f"rank {rank}")]
        labels += [("thread_name", row + 1, name) for row, (name, _) in enumerate(rows)]
        for kind, row, name in labels:
            label = {"ph": "M", "name": kind, "pid": rank, "tid": row, "args": {"name": name}}
            merged_events.append(label)
    return {"displayTimeUnit": "ms", "traceEvents": merged_events}


def place(rows: list, name: str, start: int, end: int) -> tuple[int, int]:
    """Return the number of the row for an event, and its end.

    Perfetto shows an event only if it is completely inside or outside of each other in its row. An
    end that exceeds that of the outer event by at most 1 µs is rounded.
    """
    for number, (row_name, ends) in enumerate(rows):
        ends[:] = [other for other in ends if other > start]
        if row_name == name and all(end <= other + 1000 for other in ends):
            ends.append(min([end, *ends]))
            return number, ends[-1]
    rows.append((name, [end]))
    return len(rows) - 1, end


if __name__ == "__main__":
    with one_line_errors():
        parser = Parser(__doc__)
        parser.add_argument("folder", type=Path, help="contains one trace per rank")
        options = parser.parse_args()
        ranks = load(options.folder)
        if not ranks:
            raise UserError(f"no trace in {options.folder}")
        print(f"milliseconds per step (medians):\n\n{table(HEAD, compare(ranks))}")
        path = options.folder / "all_ranks.json.gz"
        path.write_bytes(gzip.compress(json.dumps(merged(ranks)).encode(), mtime=0))
        print(f"\nwrote {path}, for https://ui.perfetto.dev")
