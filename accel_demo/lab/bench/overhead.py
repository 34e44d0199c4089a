"""What a step of the same training costs in plain PyTorch, in raw DDP and with Accelerate.

accel-demo bench overhead

The train files run as they are, in turns, on one thread per process: a tiny model, where overhead
shows, and the default one, at one process and at two. A run counts with its median step. Then both
loops run under Python's profiler, which tells where the difference is. It makes calls of Python
functions look dearer than they are.
"""

import cProfile
import platform
import pstats
import statistics

from tqdm import tqdm

from accel_demo.lab.bench.crew import Crew
from accel_demo.lab.bench.report import Report, Table, median_interval

REPEATS = 21
BATCH_SIZE = 128
STEPS = {"tiny_cnn": 60, "small_cnn": 20}  # of one run; the first tenth warms up
TELLINGS = {1: ["plain PyTorch", "raw DDP", "Accelerate"], 2: ["raw DDP", "Accelerate"]}
PROFILED_RUNS = 5
DEAREST = 6  # calls to list
REST = "everything else"
NO_CAUSES = (
    f"No table of causes: the profiler of Python {platform.python_version()} loses its place at "
    "calls that torch makes (cpython#122029)."
)

# What the loops of train_plain.py and train.py call, under a common name for both. The lines of the
# loop itself divide the loss; in train.py `backward` does.
PARTS = {
    "fetch a batch": (
        ["dataloader.__next__", "~.<method 'to' of 'torch._C.TensorBase' objects>"],
        ["accelerate/data_loader.__iter__"],
    ),
    "accumulate: does this batch share gradients?": (
        ["main"],
        ["contextlib.__enter__", "contextlib.__exit__", "contextlib.helper"],
    ),
    "forward": (
        [
            "module._wrapped_call_impl",
            "autocast_mode.__enter__",
            "autocast_mode.__exit__",
            "~.<method 'float' of 'torch._C.TensorBase' objects>",
        ],
        ["module._wrapped_call_impl"],
    ),
    "backward": (["_tensor.backward", "grad_scaler.scale"], ["accelerate/accelerator.backward"]),
    "clip gradients": (
        ["clip_grad._no_grad_wrapper", "grad_scaler.unscale_"],
        ["accelerate/accelerator.clip_grad_norm_"],
    ),
    "optimizer step": (
        ["grad_scaler.step", "grad_scaler.update", "grad_scaler.get_scale"],
        ["accelerate/optimizer.step", "accelerate/accelerator.optimizer_step_was_skipped"],
    ),
    "zero gradients": (["_compile.inner"], ["accelerate/optimizer.zero_grad"]),
    "learning rate": (
        ["lr_scheduler.step", "lr_scheduler.get_last_lr"],
        ["accelerate/scheduler.step", "accelerate/scheduler.get_last_lr"],
    ),
    "log": (
        ["metrics.interval"],
        ["metrics.interval", "accelerate/accelerator.reduce", "accelerate/accelerator._inner"],
    ),
}


def add_options(parser) -> None:
    """Add no option: those that every benchmark has are enough."""


def measure(options) -> Report:
    """Tables of microseconds per step, of what Accelerate adds to them, and of where."""
    tables, findings, facts = [], [], {}
    extra: dict[str, list[float]] = {}
    with Crew(1, threads=1) as alone, Crew(2, threads=1) as pair:
        crews = {1: alone, 2: pair}
        for model in STEPS:
            microseconds, devices = in_turns(crews, model, options.repeats)
            for processes, tellings in TELLINGS.items():
                rows = {name: microseconds[processes, name] for name in tellings}
                count = f"{processes} process{'es' if processes > 1 else ''}"
                name = f"{model}, {count} on {devices[processes]}"
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
        if profiler_keeps_its_place():
            tables += causes(alone)
        else:
            findings.append(NO_CAUSES)
    return Report("overhead", tables, findings, facts)


def in_turns(crews: dict[int, Crew], model: str, repeats: int) -> tuple[dict, dict]:
    """{(processes, telling): microseconds per step of each repeat}, {processes: device}."""
    runs = [(processes, name) for processes, names in TELLINGS.items() for name in names]
    microseconds: dict = {run: [] for run in runs}
    devices = {}
    for repeat in tqdm(range(repeats), desc=f"steps of {model}", unit="repeat"):
        shift = repeat % len(runs)  # nobody is always first
        for processes, telling in runs[shift:] + runs[:shift]:
            warm_up = STEPS[model] // 10
            answer = crews[processes].run(telling, choices(model), warm_up=warm_up)
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
    return any(name == "main" for _, _, name in pstats.Stats(profiler).stats)


def causes(crew: Crew) -> list[Table]:
    """Under the profiler, what the tiny step takes more in train.py than in train_plain.py.

    By part of the step, and by what Accelerate's functions call that a plain step never does.
    """
    steps = STEPS["tiny_cnn"]
    parts: dict[str, list[float]] = {}
    inside: dict[str, list[float]] = {}
    tellings = ["plain PyTorch", "Accelerate"]
    for repeat in tqdm(range(PROFILED_RUNS), desc="profile", unit="repeat"):
        found = {}
        for telling in tellings if repeat % 2 else tellings[::-1]:
            found[telling] = crew.run(telling, choices("tiny_cnn"), profiled=True)
        plain, ours = (found[telling] for telling in tellings)
        before, after = by_part(plain, 0), by_part(ours, 1)
        for part in before:
            parts.setdefault(part, []).append(after[part] - before[part])
        for name, (count, seconds) in ours["inside"].items():
            called = name.split(": ")[-1]
            if count >= steps // 10 and plain["counts"].get(called, 0) < steps // 10:
                inside.setdefault(name, []).append(1e6 * seconds / steps)
    inside = {name: values for name, values in inside.items() if len(values) == PROFILED_RUNS}
    dearest = sorted(inside, key=lambda name: -statistics.median(inside[name]))[:DEAREST]
    title = "Where: Accelerate less plain PyTorch on tiny_cnn, under the profiler"
    tables = [Table(title, "µs per step", parts, digits=0)]
    if dearest:
        title = "Inside: Accelerate's dearest lines and calls, without those of a plain step"
        rows = {name: inside[name] for name in dearest}
        tables.append(Table(title, "µs per step", rows, digits=0))
    return tables


def by_part(profile: dict, telling: int) -> dict[str, float]:
    """Microseconds per step of each part, without functions that are called once per run.

    `telling` is 0 for train_plain.py and 1 for train.py. Raises `RuntimeError` where a part has no
    call at all: then a function of PARTS has another name in these versions.
    """
    steps = STEPS["tiny_cnn"]
    part_of = {name: part for part, names in PARTS.items() for name in names[telling]}
    found = dict.fromkeys([*PARTS, REST], 0.0)
    for function, (count, seconds) in profile["calls"].items():
        if count >= steps // 10:  # what is logged is called every tenth step
            found[part_of.get(function, REST)] += 1e6 * seconds / steps
    missing = [part for part in PARTS if not found[part] and PARTS[part][telling] != ["main"]]
    if missing:
        raise RuntimeError(f"the profile shows no call for {', '.join(missing)}")
    return {**found, "the loop's own lines": 1e6 * profile["own"] / steps}
