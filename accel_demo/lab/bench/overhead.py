"""Compare how long a training step takes in plain PyTorch, raw DDP and Accelerate.

accel-demo bench overhead
accel-demo bench overhead --quick --json overhead.json

The unmodified train files run alternately, in one process and in two processes with one thread
each. They train the default model, and a tiny model that makes the overhead visible. The result of
a run is its median step time on a CPU, and its mean step time on a GPU. In further runs, hooks time
the parts of a step. In the last runs, Python's profiler finds the slowest calls. The profiler slows
down every call of a Python function.
"""

import cProfile
import platform
import pstats
import statistics
from argparse import Namespace

from tqdm import tqdm

from accel_demo.lab.measurements import Report, Table, median_interval
from accel_demo.lab.step_parts import PARTS
from accel_demo.lab.worker_pool import WorkerPool, WorkerResult
from accel_demo.wording import counted

REPEATS = 21
BATCH_SIZE = 128
STEPS = {"tiny_cnn": 60, "small_cnn": 20}  # steps per run; the first tenth is warm-up
VERSIONS = {1: ["plain PyTorch", "raw DDP", "Accelerate"], 2: ["raw DDP", "Accelerate"]}
WATCHED_RUNS = 5
SLOWEST = 6  # number of calls to list
NO_PROFILE = (
    "No table of calls inside Accelerate, because the profiler of Python "
    f"{platform.python_version()} misses some calls to C++ functions (cpython#122029)."
)


def measure(options: Namespace) -> Report:
    """Measure step times, and how much time Accelerate adds to each part of a step."""
    tables, findings = [], []
    added: dict[str, list[float]] = {}
    with WorkerPool(1, threads=1) as alone, WorkerPool(2, threads=1) as pair:
        for model in STEPS:
            microseconds, devices = in_turns({1: alone, 2: pair}, model, options.repeats)
            for processes, (reference, *others) in VERSIONS.items():
                rows = {name: microseconds[processes, name] for name in (reference, *others)}
                name = f"{model}, {counted(processes, 'process')} on {devices[processes]}"
                table = Table(f"Step of {name}", "µs", rows, reference, digits=0)
                tables.append(table)
                pairs = zip(rows["Accelerate"], rows[reference], strict=True)
                differences = [accelerate - without for accelerate, without in pairs]
                added[f"{name}: Accelerate less {reference}"] = differences
                ratio_interval = table.rows["Accelerate"].ratio_interval
                findings.append(sentence(name, reference, differences, ratio_interval))
        tables.append(Table("What Accelerate adds to a step", "µs", added, digits=0))
        tables.append(parts_of_a_step(alone))
        if profiler_counts_all_calls():
            tables += slowest_calls(alone)
        else:
            findings.append(NO_PROFILE)
    return Report(tables, findings)


def in_turns(
    pools: dict[int, WorkerPool], model: str, repeats: int
) -> tuple[dict[tuple[int, str], list[float]], dict[int, str]]:
    """Measure the step time of every version once per repetition.

    Returns {(processes, version): [microseconds per step]} and {processes: device}.
    """
    runs = [(processes, version) for processes in VERSIONS for version in VERSIONS[processes]]
    microseconds: dict[tuple[int, str], list[float]] = {run: [] for run in runs}
    devices = {}
    for repeat in tqdm(range(repeats), desc=f"steps of {model}", unit="repeat"):
        shift = repeat % len(runs)  # so that each repetition starts with a different run
        for processes, version in runs[shift:] + runs[:shift]:
            warm_up = STEPS[model] // 10
            result = pools[processes].run(version, choices(model), warm_up=warm_up)
            microseconds[processes, version].append(1e6 * typical_step(result))
            devices[processes] = result["device"]
    return microseconds, devices


def typical_step(result: WorkerResult) -> float:
    """Return the median step time in seconds, which short disturbances hardly affect.

    On a GPU, return the mean instead: Python does not wait until the GPU has finished a step, so
    the measured times of single steps are meaningless.
    """
    if result["device"] != "cpu":
        return result["seconds_per_step"]
    pairs = zip(result["stamps"], result["stamps"][1:], strict=False)
    return statistics.median(after - before for before, after in pairs)


def choices(model: str) -> dict:
    """Return TrainConfig fields for a run of `STEPS[model]` steps, in one process or in two."""
    steps = STEPS[model]
    choices = {"model": model, "dataset": "synthetic", "max_steps": steps, "test_samples": 64}
    return {**choices, "train_samples": 2 * steps * BATCH_SIZE, "batch_size": BATCH_SIZE}


def sentence(
    name: str, reference: str, differences: list[float], ratio_interval: list[float]
) -> str:
    median, interval = statistics.median(differences), median_interval(differences)
    text = f"{name}: Accelerate adds {median:.0f} µs per step to {reference}"
    if not interval:
        return f"{text} (an interval needs at least five repetitions)."
    return (
        f"{text}, 90 % interval {interval[0]:.0f} to {interval[1]:.0f} µs; "
        f"the ratio's is {ratio_interval[0]:.3f} to {ratio_interval[1]:.3f}."
    )


def profiler_counts_all_calls() -> bool:
    """Return False if cProfile misses calls to C functions that are bound as methods.

    In Python 3.12.1 and 3.13.0, cProfile records the return from such a function but not the call
    (cpython#122029), and so attributes all later calls to the wrong caller. This affects the
    methods of torch's C++ classes.
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
        plain, accelerate = both_loops(pool, repeat, "parts")
        for part in PARTS:
            difference = median_seconds(accelerate, part) - median_seconds(plain, part)
            added[part].append(1e6 * difference)
    title = "Where: Accelerate less plain PyTorch on tiny_cnn"
    return Table(title, "µs per step", added, digits=0)


def median_seconds(result: WorkerResult, part: str) -> float:
    return statistics.median(step[part] for step in result["parts"])


def slowest_calls(pool: WorkerPool) -> list[Table]:
    """List the slowest calls in Accelerate that a plain PyTorch step does not make.

    Return one table in a list, or an empty list if there are none.
    """
    steps = STEPS["tiny_cnn"]
    microseconds: dict[str, list[float]] = {}
    for repeat in tqdm(range(WATCHED_RUNS), desc="profile", unit="repeat"):
        plain, accelerate = both_loops(pool, repeat, "profile")
        for name, (calls, seconds) in accelerate["inside"].items():
            function = name.split(": ")[-1]
            if calls >= steps // 10 and plain["counts"].get(function, 0) < steps // 10:
                microseconds.setdefault(name, []).append(1e6 * seconds / steps)
    rows = {name: values for name, values in microseconds.items() if len(values) == WATCHED_RUNS}
    slowest = sorted(rows, key=lambda name: -statistics.median(rows[name]))[:SLOWEST]
    title = "Inside: Accelerate's slowest lines and calls, without those of a plain step"
    table = Table(title, "µs per step", {name: rows[name] for name in slowest}, digits=0)
    return [table] if slowest else []


def both_loops(pool: WorkerPool, repeat: int, watched: str) -> tuple[WorkerResult, WorkerResult]:
    """Train the tiny model with train_plain.py and train.py, in alternating order."""
    versions = ["plain PyTorch", "Accelerate"]
    results = {}
    for version in versions if repeat % 2 else versions[::-1]:
        results[version] = pool.run(version, choices("tiny_cnn"), watched=watched)
    return results["plain PyTorch"], results["Accelerate"]
