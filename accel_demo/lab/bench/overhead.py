"""What a step of the same training costs in plain PyTorch, in raw DDP and with Accelerate.

accel-demo bench overhead

The train files run as they are, in turns, on one thread per process: a tiny model, where overhead
shows, and the default one, at one process and at two. A run counts with its median step. Then both
loops run with hooks that time the parts of a step, and under Python's profiler, which makes calls
of Python functions slower.
"""

import cProfile
import platform
import pstats
import statistics

from tqdm import tqdm

from accel_demo.lab.measurements import Report, Table, median_interval
from accel_demo.lab.step_parts import PARTS
from accel_demo.lab.worker_pool import WorkerPool
from accel_demo.wording import counted

REPEATS = 21
BATCH_SIZE = 128
STEPS = {"tiny_cnn": 60, "small_cnn": 20}  # of one run; the first tenth warms up
TELLINGS = {1: ["plain PyTorch", "raw DDP", "Accelerate"], 2: ["raw DDP", "Accelerate"]}
WATCHED_RUNS = 5
DEAREST = 6  # calls to list
NO_PROFILE = (
    "No table of calls inside Accelerate: the profiler of Python "
    f"{platform.python_version()} loses its place at calls that torch makes (cpython#122029)."
)


def add_options(parser) -> None:
    """Add no option: those that every benchmark has are enough."""


def measure(options) -> Report:
    """Tables of microseconds per step, of what Accelerate adds to them, and of where."""
    tables, findings, facts = [], [], {}
    extra: dict[str, list[float]] = {}
    with WorkerPool(1, threads=1) as alone, WorkerPool(2, threads=1) as pair:
        pools = {1: alone, 2: pair}
        for model in STEPS:
            microseconds, devices = in_turns(pools, model, options.repeats)
            for processes, tellings in TELLINGS.items():
                rows = {name: microseconds[processes, name] for name in tellings}
                place = f"{counted(processes, 'process')} on {devices[processes]}"
                name = f"{model}, {place}"
                table = Table(f"Step of {name}", "µs", rows, tellings[0], digits=0)
                pairs = zip(rows["Accelerate"], rows[tellings[0]], strict=True)
                added = [ours - theirs for ours, theirs in pairs]
                tables.append(table)
                extra[f"{name}: Accelerate less {tellings[0]}"] = added
                findings.append(sentence(name, tellings[0], added, table.ratios("Accelerate")))
                facts[name] = {
                    "processes": processes,
                    "added_microseconds": statistics.median(added),
                    "added_interval": median_interval(added),
                    "ratio_interval": median_interval(table.ratios("Accelerate")),
                }
        tables.append(Table("What Accelerate adds to a step", "µs", extra, digits=0))
        tables.append(parts_of_a_step(alone))
        if profiler_keeps_its_place():
            tables += dearest_calls(alone)
        else:
            findings.append(NO_PROFILE)
    return Report("overhead", tables, findings, facts)


def in_turns(pools: dict[int, WorkerPool], model: str, repeats: int) -> tuple[dict, dict]:
    """{(processes, telling): microseconds per step of each repeat}, {processes: device}."""
    runs = [(processes, name) for processes, names in TELLINGS.items() for name in names]
    microseconds: dict = {run: [] for run in runs}
    devices = {}
    for repeat in tqdm(range(repeats), desc=f"steps of {model}", unit="repeat"):
        shift = repeat % len(runs)  # nobody is always first
        for processes, telling in runs[shift:] + runs[:shift]:
            warm_up = STEPS[model] // 10
            answer = pools[processes].run(telling, choices(model), warm_up=warm_up)
            microseconds[processes, telling].append(1e6 * typical_step(answer))
            devices[processes] = answer["device"]
    return microseconds, devices


def typical_step(answer: dict) -> float:
    """Seconds of the median step, which a hiccup of the machine leaves alone.

    On a GPU the mean step: there Python runs ahead, and a single step says little.
    """
    if answer["device"] != "cpu":
        return answer["seconds_per_step"]
    pairs = zip(answer["stamps"], answer["stamps"][1:], strict=False)
    return statistics.median(after - before for before, after in pairs)


def choices(model: str) -> dict:
    """One epoch of STEPS steps for each process of two, on synthetic images."""
    return {
        "model": model,
        "dataset": "synthetic",
        "train_samples": 2 * STEPS[model] * BATCH_SIZE,
        "test_samples": 64,
        "batch_size": BATCH_SIZE,
        "max_steps": STEPS[model],
    }


def sentence(name: str, reference: str, added: list[float], ratios: list[float]) -> str:
    bounds, interval = median_interval(added), median_interval(ratios)
    text = f"{name}: Accelerate adds {statistics.median(added):.0f} µs per step to {reference}"
    if not bounds:
        return f"{text} (five repeats or more give an interval)."
    return (
        f"{text}, 90 % interval {bounds[0]:.0f} to {bounds[1]:.0f} µs; "
        f"the ratio's is {interval[0]:.3f} to {interval[1]:.3f}."
    )


def profiler_keeps_its_place() -> bool:
    """Return False if cProfile misses the calls of C functions that are bound as methods.

    In Python 3.12.1 and 3.13.0 it notes that such a function returns, but not that it was called
    (cpython#122029). Every later line is then counted for the wrong caller. torch has many of them:
    all functions of its C++ classes, such as those that write a file.
    """

    class Bound:
        call = classmethod(repr)

    def main() -> None:
        Bound.call()

    profiler = cProfile.Profile()
    profiler.runcall(main)
    return any(name == "main" for _, _, name in vars(pstats.Stats(profiler))["stats"])


def parts_of_a_step(pool: WorkerPool) -> Table:
    """Return how much longer each part of a step takes in train.py than in train_plain.py."""
    added: dict[str, list[float]] = {part: [] for part in PARTS}
    for repeat in tqdm(range(WATCHED_RUNS), desc="parts", unit="repeat"):
        plain, ours = both_loops(pool, repeat, "parts")
        for part in PARTS:
            added[part].append(median_microseconds(ours, part) - median_microseconds(plain, part))
    title = "Where: Accelerate less plain PyTorch on tiny_cnn"
    return Table(title, "µs per step", added, digits=0)


def median_microseconds(answer: dict, part: str) -> float:
    return 1e6 * statistics.median(step[part] for step in answer["parts"])


def dearest_calls(pool: WorkerPool) -> list[Table]:
    """Return what Accelerate's functions call that a plain step never does, under the profiler."""
    steps = STEPS["tiny_cnn"]
    inside: dict[str, list[float]] = {}
    for repeat in tqdm(range(WATCHED_RUNS), desc="profile", unit="repeat"):
        plain, ours = both_loops(pool, repeat, "profile")
        for name, (count, seconds) in ours["inside"].items():
            called = name.split(": ")[-1]
            if count >= steps // 10 and plain["counts"].get(called, 0) < steps // 10:
                inside.setdefault(name, []).append(1e6 * seconds / steps)
    inside = {name: values for name, values in inside.items() if len(values) == WATCHED_RUNS}
    dearest = sorted(inside, key=lambda name: -statistics.median(inside[name]))[:DEAREST]
    title = "Inside: Accelerate's dearest lines and calls, without those of a plain step"
    rows = {name: inside[name] for name in dearest}
    return [Table(title, "µs per step", rows, digits=0)] if rows else []


def both_loops(pool: WorkerPool, repeat: int, watched: str) -> tuple[dict, dict]:
    """Train the tiny model with train_plain.py and with train.py, in an order that alternates."""
    versions = ["plain PyTorch", "Accelerate"]
    answers = {}
    for version in versions if repeat % 2 else versions[::-1]:
        answers[version] = pool.run(version, choices("tiny_cnn"), watched=watched)
    return answers["plain PyTorch"], answers["Accelerate"]
