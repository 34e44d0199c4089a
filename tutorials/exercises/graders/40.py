"""Grade exercise 40: find the cause in five stored traces and in generated traces.

python tutorials/exercises/graders/40.py FILE
python tutorials/exercises/graders/40.py --write-traces     # write all stored traces but e.json.gz

traced_40.py has recorded e.json.gz, whose cause a reader finds by eye.
"""

import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from grading import Wrong, grade, import_answer, naming_errors

TRACES = Path(__file__).parent.parent / "40_traces"
STEPS, FIRST_STEP = 12, 5
BY_EYE = ("computation", 0, "aten::median")
# `accel-demo timeline` names a rank that is slower in one phase in all steps, so some cases delay a
# rank only in most of them.
MOST_STEPS = 8
NAMES = ("data", "computation", "communication", "nothing")
WAITS = "Why the waiting rank is not the slow rank"
STRAGGLER = "How `accel-demo timeline` finds a straggler"
COLUMNS = "What the columns mean"
IN_A_TRACE = "The same with `torch.profiler` alone"
WAITING = "Rank {rank} spends a long time in all-reduce, but what is it doing there?"
BOTH = "Compare when each rank starts the same all-reduce, and how long that takes on it"
EXPOSED = "How long does each rank wait for all-reduces after it has computed all its gradients?"


@dataclass(frozen=True)
class Case:
    """A trace. All times are in ms."""

    name: str  # file name or description; also the random seed
    ranks: int
    cause: tuple[str, int | None]
    slow: dict[int, float] = field(default_factory=dict)  # {rank: delay in every step}
    phase: str = "forward"  # the phase in which the delays occur
    more: dict[str, dict[int, float]] = field(default_factory=dict)  # {phase: {rank: delay}}
    delayed_steps: int = STEPS  # only the first ones have the delays above
    once: dict[tuple[int, int], float] = field(default_factory=dict)  # {(rank, step): delay}
    varies: float = 0  # largest random delay of a forward, which differs from step to step
    sending: tuple[float, float] = (3, 3)  # duration of each bucket's all-reduce, without waits
    data_wait: float = 1
    scale: float = 1  # of forward, backward and optimizer


STORED = [
    Case("a.json", 4, ("computation", 2), {2: 18}),
    Case("b.json", 3, ("data", 0), {0: 16, 2: -0.5}, "data wait", once={(1, 2): 40}),
    Case("c.json", 3, ("communication", None), sending=(20, 35), once={(1, 3): 30}),
    Case("d.json", 4, ("nothing", None), varies=16, once={(1, 3): 90}),
]
MORE = [
    Case("two ranks, rank 0 slow", 2, ("computation", 0), {0: 12}),
    Case("five ranks, rank 4 waiting for data", 5, ("data", 4), {4: 15}, "data wait"),
    Case("five ranks, slow single steps", 5, ("nothing", None), once={(3, 1): 90, (3, 5): 90}),
    Case(
        "four ranks, rank 1 slow, rank 3 fast",
        *(4, ("computation", 1), {1: 22, 3: -8}, "backward"),
        once={(2, 0): 60},
    ),
    Case("three ranks, rank 2 slow", 3, ("computation", 2), {2: 14}, "optimizer"),
    Case("four ranks, rank 1 fast", 4, ("nothing", None), {1: -9}),
    Case("three ranks, hidden all-reduces", 3, ("nothing", None), sending=(17, 3)),
    Case("four ranks, long waits for data", 4, ("data", None), data_wait=40),
    Case("two ranks, long all-reduces", 2, ("communication", None), sending=(3, 45)),
    Case(
        "four ranks, rank 3 slow, long all-reduces",
        *(4, ("computation", 3), {3: 15}),
        sending=(20, 35),
    ),
    Case("five ranks, different delays", 5, ("nothing", None), varies=16),
    Case("three ranks wait, rank 1 slow", 3, ("computation", 1), {1: 20}, data_wait=30),
    Case("four ranks, three of them slow", 4, ("nothing", None), {0: 40, 1: 40, 2: 40}),
    Case("three ranks wait", 4, ("nothing", None), {0: 40, 1: 40, 2: 40}, "data wait"),
    Case("two ranks, both causes", 2, ("data", None), sending=(3, 60), data_wait=60),
    Case("two ranks, long steps", 2, ("nothing", None), data_wait=30, scale=4),
    Case("four ranks, rank 1 much faster", 4, ("nothing", None), {1: -19}),
    Case(
        "four ranks, rank 1 waits for data, but catches up",
        *(4, ("nothing", None), {1: 18}, "data wait", {"forward": {1: -18}}, MOST_STEPS),
    ),
    Case(
        "four ranks, rank 2 late only at the first bucket",
        *(4, ("nothing", None), {2: 30}, "forward", {"backward": {2: -30}}, MOST_STEPS),
    ),
    Case(
        "three ranks, rank 1 slow, two of them wait for data",
        *(3, ("computation", 1), {1: 15, 2: -11}, "forward", {"data wait": {1: 11, 2: 11}}),
    ),
    Case(
        "two ranks, one waits for data, the other computes longer",
        *(2, ("nothing", None), {0: 59}, "data wait", {"forward": {1: 59}}, MOST_STEPS),
    ),
]
RIGHT = f"the cause is correct in all {len(STORED) + 1} traces and in {len(MORE)} more"


@dataclass(frozen=True)
class Mistake:
    """A case for which the answer returned a wrong cause."""

    case: Case
    returned: tuple
    longest: int  # the rank that spends the most time in all-reduce


def observe(answer: Path) -> None:
    module = import_answer(answer)
    check_by_eye(getattr(module, "BY_EYE", None))
    mistakes = []
    for case in STORED + MORE:
        text = (
            (TRACES / case.name).read_text(encoding="utf-8")
            if case in STORED
            else json.dumps(make(case))
        )
        with naming_errors(f"{case.name}: cause(trace) raises"):
            returned = module.cause(json.loads(text))
        check_form(case, returned)
        if tuple(returned) != case.cause:
            mistakes.append(Mistake(case, tuple(returned), longest_all_reduce(json.loads(text))))
    if mistakes:
        first = mistakes[0]
        because, read = explanation(mistakes)
        raise Wrong(
            f"{first.case.name}: cause(trace) returns {first.returned!r}, but the right answer is "
            f"{first.case.cause!r}. {because}",
            read,
        )


def check_by_eye(found) -> None:
    """Raise `Wrong` if this is not the cause in e.json.gz."""
    is_triple = isinstance(found, tuple | list) and len(found) == 3 and found[0] in NAMES
    if not is_triple:
        raise Wrong(f'BY_EYE is {found!r}. Write a cause, a rank, and an operator or ""')
    name, rank, operator = found
    text = f"e.json.gz: BY_EYE is {found!r}, which is not the cause. "
    if rank == 1:
        raise Wrong(text + WAITING.format(rank=1), WAITS)
    if rank != BY_EYE[1]:
        raise Wrong(text + BOTH, IN_A_TRACE)
    if name != BY_EYE[0]:
        raise Wrong(f"{text}What does rank {rank} do before it starts its all-reduces?", IN_A_TRACE)
    if operator != BY_EYE[2]:
        text += f"Which operator does only rank {rank} run in each step? Name the outermost one."
        raise Wrong(text, IN_A_TRACE)


def check_form(case: Case, returned) -> None:
    """Raise `Wrong` if the answer is not one of the pairs in the exercise's docstring."""
    returns = f"{case.name}: cause(trace) returns {returned!r}"
    if not isinstance(returned, tuple | list) or len(returned) != 2 or returned[0] not in NAMES:
        raise Wrong(f'{returns}. Return a pair, such as ("computation", 2) or ("nothing", None)')
    name, rank = returned
    if rank is None and name != "computation":
        return
    if name in ("communication", "nothing"):
        raise Wrong(f'{returns}. "{name}" concerns all ranks, so the second item must be None')
    if rank in range(case.ranks):
        return
    if rank in range(1000, 1000 * case.ranks, 1000):
        raise Wrong(f"{returns}. That is the process ID (pid) in the trace: return the rank")
    raise Wrong(f"{returns}. The second item must be a rank, an int from 0 to {case.ranks - 1}")


def explanation(mistakes: list[Mistake]) -> tuple[str, str]:
    """Return a sentence that explains the mistakes, and the heading of the section to read."""
    for is_typical, sentence, heading in TYPICAL:
        if all(is_typical(mistake) for mistake in mistakes):
            return sentence.format(rank=mistakes[0].returned[1]), heading
    return explanation_of(mistakes[0])


def blames_a_waiting_rank(mistake: Mistake) -> bool:
    (_, slow), (_, blamed) = mistake.case.cause, mistake.returned
    return blamed is not None and (blamed == mistake.longest or slow not in (None, blamed))


# Mistakes that explain all wrong results of an answer: (test, sentence, heading of the section).
TYPICAL: list[tuple[Callable[[Mistake], bool], str, str]] = [
    (
        lambda mistake: mistake.returned[1] in {rank for rank, _ in mistake.case.once},
        "Rank {rank} is slow only in single steps, which must not count",
        STRAGGLER,
    ),
    (blames_a_waiting_rank, WAITING, WAITS),
    (
        lambda mistake: (
            "data" in (mistake.case.cause[0], mistake.returned[0])
            and (mistake.case.cause[1], mistake.returned[1]) != (None, None)
        ),
        "How long does each rank wait for data, compared with the other ranks?",
        COLUMNS,
    ),
    (
        lambda mistake: "communication" in (mistake.case.cause[0], mistake.returned[0]),
        EXPOSED,
        COLUMNS,
    ),
]


def explanation_of(mistake: Mistake) -> tuple[str, str]:
    """Return a sentence that explains one mistake, and the heading of the section to read."""
    (name, rank), (blamed_for, blamed) = mistake.case.cause, mistake.returned
    if blames_a_waiting_rank(mistake):
        return WAITING.format(rank=blamed), WAITS
    if blamed == rank is not None:
        return f"Rank {rank} is slow, but it loses its time in {mistake.case.phase}", COLUMNS
    if rank is not None:
        return (
            f"All others wait for rank {rank} in most steps, because of its {mistake.case.phase}",
            WAITS,
        )
    if blamed is not None:
        return (
            f"If rank {blamed} were as fast as the others, most steps would take about as long",
            STRAGGLER,
        )
    if "data" in (name, blamed_for):
        return (
            "What share of a step does each rank wait for data, and which cause comes first?",
            COLUMNS,
        )
    return EXPOSED, COLUMNS


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
        first_ms, second_ms = (ms + generator.uniform(0, 0.5) for ms in case.sending)
        first_end = max(first for first, _ in ready) + first_ms
        second_end = max(first_end, max(second for _, second in ready)) + second_ms
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
            # They overlap, so each bucket has its own row.
            for tid, start, end in zip((2, 3), ready[rank], (first_end, second_end), strict=True):
                events.append(make_event("gloo:all_reduce", start, end, rank, tid))
            begins[rank] = ends["optimizer"] + 0.2
    return {"displayTimeUnit": "ms", "traceEvents": events}


def phase_durations(case: Case, rank: int, step: int, generator: random.Random) -> dict:
    """Return how many ms a rank needs for each phase of a step, without waiting for others."""
    computing = {"forward": 20, "backward": 40, "optimizer": 6}
    undisturbed = {"data wait": case.data_wait}
    undisturbed |= {phase: ms * case.scale for phase, ms in computing.items()}
    durations = {phase: ms + generator.uniform(0, 0.8) for phase, ms in undisturbed.items()}
    durations["forward"] += generator.uniform(0, case.varies)
    durations[case.phase] += case.once.get((rank, step), 0)
    if step < case.delayed_steps:
        durations[case.phase] += case.slow.get(rank, 0)
        for phase, delays in case.more.items():
            durations[phase] += delays.get(rank, 0)
    durations = {phase: max(0.5, ms) for phase, ms in durations.items()}
    return durations


def make_event(name: str, start: float, end: float, rank: int, tid: int) -> dict:
    """Return a trace event with a duration. `start` and `end` are in ms, but the trace uses µs."""
    kind = "cpu_op" if name.startswith("gloo") else "user_annotation"
    times = {"ts": round(1000 * start, 3), "dur": round(1000 * (end - start), 3)}
    return {"ph": "X", "cat": kind, "name": name, "pid": 1000 * rank, "tid": tid, **times}


def write_traces() -> None:
    TRACES.mkdir(exist_ok=True)
    for case in STORED:
        (TRACES / case.name).write_text(json.dumps(make(case)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--write-traces"]:
        write_traces()
    else:
        sys.exit(grade(__file__, __doc__, observe, right=RIGHT, time_limit=20))
