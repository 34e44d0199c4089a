"""What a step of the same training costs in plain PyTorch, in raw DDP and with Accelerate.

accel-demo bench overhead

The train files run as they are, in turns, on one thread per process: a tiny model, where overhead
shows, and the default one, at one process and at two. Then both loops run under Python's profiler,
which tells where the difference is. It makes calls of Python functions look dearer than they are.
"""

import statistics

from tqdm import tqdm

from accel_demo.lab.bench.crew import Crew
from accel_demo.lab.bench.report import Report, Table, median_interval

REPEATS = 25
BATCH_SIZE = 128
STEPS = {"tiny_cnn": 150, "small_cnn": 40}  # of one run; the first tenth warms up
TELLINGS = {1: ["plain PyTorch", "raw DDP", "Accelerate"], 2: ["raw DDP", "Accelerate"]}
PROFILED_RUNS = 5
DEAREST = 6  # calls to list

# What the loops of train_plain.py and train.py call, under a common name for both.
PARTS = {
    "fetch a batch": ["dataloader.__next__", "data_loader.__iter__"],
    "accumulate (which batch shares gradients?)": [
        "contextlib.__enter__",
        "contextlib.__exit__",
        "contextlib.helper",
    ],
    "forward": [
        "module._wrapped_call_impl",
        "autocast_mode.__enter__",
        "autocast_mode.__exit__",
        "~.<method 'float' of 'torch._C.TensorBase' objects>",
    ],
    "backward": ["_tensor.backward", "accelerator.backward", "grad_scaler.scale"],
    "clip gradients": [
        "clip_grad._no_grad_wrapper",
        "accelerator.clip_grad_norm_",
        "grad_scaler.unscale_",
    ],
    "optimizer step": [
        "grad_scaler.step",
        "grad_scaler.update",
        "grad_scaler.get_scale",
        "optimizer.step",
        "accelerator.optimizer_step_was_skipped",
    ],
    "zero gradients": ["_compile.inner", "optimizer.zero_grad"],
    "learning rate": [
        "lr_scheduler.step",
        "lr_scheduler.get_last_lr",
        "scheduler.step",
        "scheduler.get_last_lr",
    ],
    "log": ["accelerator.reduce", "accelerator._inner", "metrics.interval"],
}


def add_options(parser) -> None:
    """None of its own."""


def measure(options) -> Report:
    """Tables of microseconds per step, of what Accelerate adds to them, and of where."""
    tables, findings, facts = [], [], {}
    extra: dict[str, list[float]] = {}
    with Crew(1, threads=1) as alone, Crew(2, threads=1) as pair:
        crews = {1: alone, 2: pair}
        for model in STEPS:
            seconds = in_turns(crews, model, options.repeats)
            for processes, tellings in TELLINGS.items():
                rows = {
                    name: [1e6 * value for value in seconds[processes, name]] for name in tellings
                }
                name = f"{model}, {processes} process{'es' if processes > 1 else ''}"
                table = Table(f"Step of {name}", "µs", rows, tellings[0], digits=0)
                pairs = zip(rows["Accelerate"], rows[tellings[0]], strict=True)
                added = [ours - theirs for ours, theirs in pairs]
                tables.append(table)
                extra[f"{name}: Accelerate − {tellings[0]}"] = added
                findings.append(sentence(name, tellings[0], added, table.ratios("Accelerate")))
                facts[name] = {
                    "added_microseconds": statistics.median(added),
                    "added_interval": median_interval(added),
                    "ratio_interval": median_interval(table.ratios("Accelerate")),
                }
        tables.append(Table("What Accelerate adds to a step", "µs", extra, digits=0))
        tables += causes(alone)
    return Report("overhead", tables, findings, facts)


def in_turns(crews: dict[int, Crew], model: str, repeats: int) -> dict:
    """{(processes, telling): mean seconds per step of each repeat}."""
    runs = [(processes, name) for processes, names in TELLINGS.items() for name in names]
    seconds: dict = {run: [] for run in runs}
    for repeat in tqdm(range(repeats), desc=f"steps of {model}", unit="repeat"):
        shift = repeat % len(runs)  # nobody is always first
        for processes, telling in runs[shift:] + runs[:shift]:
            answer = crews[processes].run(telling, choices(model))
            steps = answer["wall_seconds"][STEPS[model] // 10 :]
            seconds[processes, telling].append(statistics.mean(steps))
    return seconds


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


def causes(crew: Crew) -> list[Table]:
    """Under the profiler, what the tiny step takes more in train.py than in train_plain.py.

    By part of the step, and by what Accelerate's functions call that a plain step never does.
    """
    steps = STEPS["tiny_cnn"]
    parts: dict[str, list[float]] = {part: [] for part in [*PARTS, "everything else"]}
    inside: dict[str, list[float]] = {}
    for _ in tqdm(range(PROFILED_RUNS), desc="profile", unit="repeat"):
        plain, ours = (
            crew.run(telling, choices("tiny_cnn"), profiled=True)
            for telling in ("plain PyTorch", "Accelerate")
        )
        before, after = by_part(plain["calls"]), by_part(ours["calls"])
        for part in parts:
            parts[part].append(after[part] - before[part])
        for name, (count, seconds) in ours["inside"].items():
            is_of_every_step = count >= steps // 10
            if is_of_every_step and plain["counts"].get(name.split(": ")[1], 0) < steps // 10:
                inside.setdefault(name, []).append(1e6 * seconds / steps)
    dearest = sorted(inside, key=lambda name: -statistics.median(inside[name]))[:DEAREST]
    title = "Where: Accelerate − plain PyTorch on tiny_cnn, under the profiler"
    return [
        Table(title, "µs per step", parts, digits=0),
        Table(
            "Inside: the dearest calls that a plain step does without, under the profiler",
            "µs per step",
            {name: inside[name] for name in dearest},
            digits=0,
        ),
    ]


def by_part(calls: dict[str, tuple[int, float]]) -> dict[str, float]:
    """Microseconds per step of each part, without functions that are called once per run."""
    steps = STEPS["tiny_cnn"]
    part_of = {function: part for part, functions in PARTS.items() for function in functions}
    found = dict.fromkeys([*PARTS, "everything else"], 0.0)
    for function, (count, seconds) in calls.items():
        if count >= steps // 10:  # what is logged is called every tenth step
            found[part_of.get(function, "everything else")] += 1e6 * seconds / steps
    return found
