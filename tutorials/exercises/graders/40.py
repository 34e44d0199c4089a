"""Grade exercise 40: find the straggler in four stored traces and in four generated traces.

python tutorials/exercises/graders/40.py FILE
python tutorials/exercises/graders/14.py --write-traces     # write the four stored traces
"""

import json
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

from accel_demo.lab.grading import Wrong, described, grade, import_answer

TRACES = Path(__file__).parent.parent / "40_traces"
STEPS, FIRST_STEP = 8, 5


@dataclass(frozen=True)
class Case:
    name: str  # file name or description; also the random seed
    ranks: int
    late: dict[int, float]  # {rank: delay in every step, in ms}
    once: dict[tuple[int, int], float] = field(default_factory=dict)  # {(rank, step): delay in ms}
    phase: str = "forward"  # the phase in which the delays occur

    @property
    def straggler(self) -> int | None:
        return max(self.late, key=self.late.get) if self.late else None


STORED = [
    Case("a.json", 4, {2: 18}),
    Case("b.json", 4, {}),
    Case("c.json", 3, {}, {(1, 3): 90}),
    Case("d.json", 3, {0: 12, 2: -6}, {(1, 2): 30}, "backward"),  # rank 2 is fast: it waits longest
]
MORE = [
    Case("two ranks, rank 0 slow", 2, {0: 9}),
    Case("five ranks, rank 4 waiting for data", 5, {4: 15}, phase="data wait"),
    Case("five ranks, none slow, two slow steps", 5, {}, {(3, 1): 70, (3, 5): 70}),
    Case("four ranks, rank 1 slow, rank 3 quick", 4, {1: 14, 3: -8}, {(2, 0): 60}, "backward"),
]
RIGHT = f"in all {len(STORED)} traces, and in {len(MORE)} more"


@dataclass(frozen=True)
class WrongRank:
    """A case in which the answer returned `rank` instead of `case.straggler`."""

    case: Case
    rank: object
    longest: int  # the rank that spends the most time in all-reduce


def observe(answer: Path) -> None:
    module = import_answer(answer)
    mistakes = []
    for case in STORED + MORE:
        trace = (TRACES / case.name).read_text() if case in STORED else json.dumps(make(case))
        try:
            rank = module.straggler(json.loads(trace))
        except (Exception, SystemExit) as error:
            raise Wrong(f"{case.name}: straggler(trace) raises {described(error)}") from None
        if rank != case.straggler or isinstance(rank, bool):
            mistakes.append(WrongRank(case, rank, longest_all_reduce(json.loads(trace))))
    if mistakes:
        first = mistakes[0]
        raise Wrong(
            f"{first.case.name}: straggler(trace) returns {first.rank!r}, but the right answer is "
            f"{first.case.straggler}. {explanation(mistakes)}"
        )


def explanation(mistakes: list[WrongRank]) -> str:
    """Return a hint that explains all wrong answers, or else only the first one."""
    case, rank = mistakes[0].case, mistakes[0].rank
    if rank is not None and (type(rank) is not int or not 0 <= rank < case.ranks):
        if isinstance(rank, int) and rank in {1000 * rank for rank in range(case.ranks)}:
            return "That is the process number (pid) of the trace: return the rank"
        return f"Return a rank, an int from 0 to {case.ranks - 1}, or None"
    if all(mistake.rank is None for mistake in mistakes):
        if all(mistake.case.phase == "data wait" for mistake in mistakes):
            return "It loses its time in data wait, before it computes: include this phase"
        return "No rank was named: compare when each rank starts the same all-reduce"
    if all(mistake.rank == mistake.longest for mistake in mistakes):
        return (
            f"Rank {rank} spends the most time in all-reduce because it waits there for a rank "
            "that starts late: which rank starts last?"
        )
    if all(
        mistake.case.straggler is None and mistake.rank in {rank for rank, _ in mistake.case.once}
        for mistake in mistakes
    ):
        return f"Rank {rank} is slow in single steps only: use the median over the steps"
    if case.straggler is None:
        return "No rank is slow there: a straggler is at least 5 ms late in most steps"
    return (
        f"Rank {case.straggler} is the last to start the all-reduces, and loses its time in "
        f"{case.phase}"
    )


def longest_all_reduce(trace: dict) -> int:
    """Return the rank that spends the most time in all-reduce."""
    waited: dict[int, float] = {}
    for event in trace["traceEvents"]:
        if event["name"] == "gloo:all_reduce":
            waited[event["pid"]] = waited.get(event["pid"], 0) + event["dur"]
    return max(waited, key=waited.get) // 1000


def make(case: Case) -> dict:
    """Return a trace with phases and all-reduces, in the format of `accel_demo.lab.timeline`."""
    generator = random.Random(case.name)
    ranks, events = range(case.ranks), []
    for rank in ranks:
        process = {"ph": "M", "name": "process_name", "pid": 1000 * rank, "tid": 0}
        events.append({**process, "args": {"name": f"rank {rank}"}})
    begins = [0.0 for _ in ranks]  # start of the step on each rank, in ms
    for step in range(STEPS):
        durations = [phase_durations(case, rank, step, generator) for rank in ranks]
        # Two buckets: the first is ready halfway through backward, the second at its end.
        ready = []
        for begin, phases in zip(begins, durations, strict=True):
            backward = begin + phases["data wait"] + phases["forward"]
            ready.append((backward + phases["backward"] / 2, backward + phases["backward"]))
        sending = 3.0 + generator.uniform(0, 0.5)
        first_end = max(first for first, _ in ready) + sending
        second_end = max(first_end, max(second for _, second in ready)) + sending
        for rank in ranks:
            ends = {
                "data wait": begins[rank] + durations[rank]["data wait"],
                "forward": ready[rank][1] - durations[rank]["backward"],
                "backward": second_end,  # includes the wait for the all-reduces
                "optimizer": second_end + durations[rank]["optimizer"],
            }
            start, name = begins[rank], f"step {step + FIRST_STEP}"
            events.append(make_event(name, start, ends["optimizer"], rank, tid=1))
            for name, end in ends.items():
                events.append(make_event(name, start, end, rank, tid=1))
                start = end
            for start, end in zip(ready[rank], (first_end, second_end), strict=True):
                events.append(make_event("gloo:all_reduce", start, end, rank, tid=2))
            begins[rank] = ends["optimizer"] + 0.2
    return {"displayTimeUnit": "ms", "traceEvents": events}


def phase_durations(case: Case, rank: int, step: int, generator: random.Random) -> dict:
    """Return how many ms a rank needs for each phase of a step, without waiting for others."""
    undisturbed = {"data wait": 1.0, "forward": 20.0, "backward": 40.0, "optimizer": 6.0}
    durations = {phase: ms + generator.uniform(0, 0.8) for phase, ms in undisturbed.items()}
    additional = case.late.get(rank, 0) + case.once.get((rank, step), 0)
    durations[case.phase] = max(0.5, durations[case.phase] + additional)
    return durations


def make_event(name: str, start: float, end: float, rank: int, tid: int) -> dict:
    """Return a trace event with a duration. `start` and `end` are in ms, but the trace uses µs."""
    kind = "cpu_op" if name.startswith("gloo") else "user_annotation"
    times = {"ts": round(1000 * start, 3), "dur": round(1000 * (end - start), 3)}
    return {"ph": "X", "cat": kind, "name": name, "pid": 1000 * rank, "tid": tid, **times}


def write_traces() -> None:
    TRACES.mkdir(exist_ok=True)
    for case in STORED:
        (TRACES / case.name).write_text(json.dumps(make(case)) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["--write-traces"]:
        write_traces()
    else:
        sys.exit(grade(__file__, __doc__, observe, right=RIGHT, time_limit=20))
