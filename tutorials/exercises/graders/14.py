"""Grade exercise 14: the straggler of the four traces beside it, and of four more made up here.

python tutorials/exercises/graders/14.py FILE
python tutorials/exercises/graders/14.py --write-traces     # those beside the exercise
"""

import argparse
import importlib.util
import json
import random
import shlex
import sys
import tempfile
from pathlib import Path

from accel_demo.processes.launch import run_to_end

TRACES = Path(__file__).parent.parent / "14_traces"
TIME_LIMIT = 20  # seconds; it takes under one
STEPS, FIRST_STEP = 8, 5
LATE = "forward"
# (file, ranks, {rank: ms later in every step}, the phase it loses them in, {(rank, step): ms once})
STORED = [
    ("a.json", 4, {2: 18}, LATE, {}),
    ("b.json", 4, {}, LATE, {}),
    ("c.json", 3, {}, LATE, {(1, 3): 90}),
    ("d.json", 3, {0: 12, 2: -6}, "backward", {(1, 2): 30}),  # rank 2 is quick: it waits longest
]
MADE_UP = [
    ("two ranks, rank 0 slow", 2, {0: 9}, LATE, {}),
    ("five ranks, rank 4 waiting for data", 5, {4: 15}, "data wait", {}),
    ("five ranks, nobody slow, two slow steps", 5, {}, LATE, {(3, 1): 70, (3, 5): 70}),
    ("four ranks, rank 1 slow, rank 3 quick", 4, {1: 14, 3: -8}, "backward", {(2, 0): 60}),
]


def main(answer: Path) -> int:
    """Say what is wrong with the answer; 0 where nothing is."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        files = f"{shlex.quote(str(answer))} --report {shlex.quote(str(report))}"
        result = run_to_end(f"python tutorials/exercises/graders/14.py {files}", TIME_LIMIT)
        found = json.loads(report.read_text()) if report.exists() else None
    if result.returncode is None:
        mistake = f"it did not end within {TIME_LIMIT} s"
    elif found is None:
        mistake = "the file cannot be used: it ended the program"
    else:
        mistake = found
    if mistake:
        print(f"wrong: {mistake}")
        return 1
    print(f"right: in all {len(STORED)} traces, and in {len(MADE_UP)} more")
    return 0


def watch(answer: Path) -> str:
    """The sentence that says what is wrong with the answer, or nothing."""
    try:
        spec = importlib.util.spec_from_file_location("answer", answer)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        return f"the file cannot be used: {type(error).__name__}: {error}"
    cases = [(case, json.loads((TRACES / case[0]).read_text())) for case in STORED]
    cases += [(case, make(*case[1:], seed=case[0])) for case in MADE_UP]
    mistakes = []
    for (name, ranks, later, phase, once), trace in cases:
        try:
            named = module.straggler(json.loads(json.dumps(trace)))
        except (Exception, SystemExit) as error:
            return f"{name}: straggler(trace) raises {type(error).__name__}: {error}"
        truth = max(later, key=later.get) if later else None
        if named != truth or isinstance(named, bool):
            mistakes.append((name, named, truth, patient(trace), ranks, phase, once))
    return judge(mistakes) if mistakes else ""


def judge(mistakes: list[tuple]) -> str:
    """What all mistakes have in common, as far as it has a name."""
    name, named, truth, longest, ranks, phase, once = mistakes[0]
    said = f"{name}: straggler(trace) gives {named!r}, the right answer is {truth}"
    if named is not None and (type(named) is not int or not 0 <= named < ranks):
        if isinstance(named, int) and named in {1000 * rank for rank in range(ranks)}:
            return f"{said}. That is the process number (pid) of the trace: return the rank"
        return f"{said}. Return a rank, an int from 0 to {ranks - 1}, or None"
    if all(named is None for _, named, *_ in mistakes):
        if all(phase == "data wait" for *_, phase, _ in mistakes):
            return f"{said}. It loses its time in data wait, before it computes: count that too"
        return f"{said}. Nobody was found: compare when each rank comes to the same all-reduce"
    wrongly = [(named, longest) for _, named, _, longest, *_ in mistakes]
    if all(named == longest for named, longest in wrongly):
        return (
            f"{said}. Rank {named} spends most time in all-reduce because it waits there for "
            "another, that comes late: who comes last?"
        )
    single = [named in {rank for rank, _ in once} for _, named, *_, once in mistakes]
    if all(truth is None for _, _, truth, *_ in mistakes) and all(single):
        return f"{said}. Rank {named} is slow in single steps only: take the median over steps"
    if truth is None:
        return f"{said}. Nobody is slow there: a straggler is 5 ms late or more, in most steps"
    return f"{said}. Rank {truth} comes last to the all-reduces, and loses its time in {phase}"


def patient(trace: dict) -> int:
    """The rank that spends most time in all-reduce."""
    waited: dict[int, float] = {}
    for event in trace["traceEvents"]:
        if event["name"] == "gloo:all_reduce":
            waited[event["pid"]] = waited.get(event["pid"], 0) + event["dur"]
    return max(waited, key=waited.get) // 1000


def make(ranks: int, later: dict, phase: str, once: dict, seed: str) -> dict:
    """A trace in the form of `accel_demo.lab.timeline.merge.merged`, with the phases alone."""
    draw = random.Random(seed)
    events = []
    for rank in range(ranks):
        about = {"ph": "M", "name": "process_name", "pid": 1000 * rank, "tid": 0}
        events.append({**about, "args": {"name": f"rank {rank}"}})
    at = [0.0] * ranks  # when each rank begins the step, in ms
    for step in range(STEPS):
        begun, came, lasts = list(at), [], []
        for rank in range(ranks):
            needs = {"data wait": 1.0, "forward": 20.0, "backward": 40.0, "optimizer": 6.0}
            needs = {name: ms + draw.uniform(0, 0.8) for name, ms in needs.items()}
            extra = later.get(rank, 0) + once.get((rank, step), 0)
            needs[phase] = max(0.5, needs[phase] + extra)
            lasts.append(needs)
            start = at[rank] + needs["data wait"] + needs["forward"]
            # Two buckets: halfway through backward, and at its end
            came.append((start + needs["backward"] / 2, start + needs["backward"]))
        sent = 3.0 + draw.uniform(0, 0.5)
        first_ends = max(first for first, _ in came) + sent
        last_ends = max(first_ends, max(last for _, last in came)) + sent
        for rank in range(ranks):
            thread = {"pid": 1000 * rank, "tid": 1}
            phases = {
                "data wait": begun[rank] + lasts[rank]["data wait"],
                "forward": came[rank][1] - lasts[rank]["backward"],
                "backward": last_ends,  # it waits in there
                "optimizer": last_ends + lasts[rank]["optimizer"],
            }
            at[rank] = phases["optimizer"] + 0.2
            number = f"step {step + FIRST_STEP}"
            events.append(event(number, begun[rank], phases["optimizer"], **thread))
            start = begun[rank]
            for name, end in phases.items():
                events.append(event(name, start, end, **thread))
                start = end
            for start, end in zip(came[rank], (first_ends, last_ends), strict=True):
                events.append(event("gloo:all_reduce", start, end, pid=1000 * rank, tid=2))
    return {"displayTimeUnit": "ms", "traceEvents": events}


def event(name: str, start: float, end: float, pid: int, tid: int) -> dict:
    """A complete event; the format has microseconds."""
    kind = "cpu_op" if name.startswith("gloo") else "user_annotation"
    times = {"ts": round(1000 * start, 3), "dur": round(1000 * (end - start), 3)}
    return {"ph": "X", "cat": kind, "name": name, "pid": pid, "tid": tid, **times}


def write_traces() -> None:
    TRACES.mkdir(exist_ok=True)
    for name, *case in STORED:
        (TRACES / name).write_text(json.dumps(make(*case, seed=name)) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answer", type=Path, nargs="?", metavar="FILE")
    parser.add_argument("--report", type=Path, help="write what is wrong here")
    parser.add_argument("--write-traces", action="store_true")
    options = parser.parse_args()
    if options.write_traces:
        write_traces()
    elif options.report:
        options.report.write_text(json.dumps(watch(options.answer)))
    else:
        sys.exit(main(options.answer.resolve()))
