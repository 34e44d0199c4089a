"""One process that trains again and again on command, and tells how long the steps took.

crew.py starts one for each rank. A line on stdin is a run, a line on stdout its answer, as JSON.
The train files run as they are: torch calls `note` after every optimizer step.
"""

import cProfile
import json
import os
import pstats
import sys
import time
from collections import defaultdict
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from accelerate.state import AcceleratorState, GradientState
from torch.optim.optimizer import register_optimizer_step_post_hook

from accel_demo import train, train_ddp, train_plain
from accel_demo.config import TrainConfig
from accel_demo.processes import rank_environment

TELLINGS = {"plain PyTorch": train_plain, "raw DDP": train_ddp, "Accelerate": train}


def main() -> None:
    answers = sys.stdout
    for line in sys.stdin:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            answer = run(**json.loads(line))
        print(json.dumps(answer), file=answers, flush=True)


def run(
    telling: str,
    choices: dict,
    precision: str,
    rank: int,
    world_size: int,
    port: int,
    profiled: bool,
) -> dict:
    """Train once. Its `wall_seconds` and `cpu_seconds` have one number per step but the first.

    `processes` is how many were connected, as the run itself found. With `profiled` there are also
    the dictionaries of `profile_of`.
    """
    forget_the_last_run()
    if world_size > 1 or telling == "raw DDP":
        os.environ.update(rank_environment(rank, world_size, port))
    os.environ["ACCELERATE_MIXED_PRECISION"] = precision
    stamps: list[tuple[float, float]] = []

    def note(optimizer, arguments, keywords):
        stamps.append((time.perf_counter(), time.process_time()))

    hook = register_optimizer_step_post_hook(note)
    profiler = cProfile.Profile()
    config, module = TrainConfig(**choices), TELLINGS[telling]
    options = () if module is train else (precision,)
    try:
        if profiled:
            profiler.runcall(module.main, config, *options)
        else:
            module.main(config, *options)
    finally:
        hook.remove()
    steps = list(zip(stamps, stamps[1:], strict=False))
    found = json.loads(Path(config.run_dir, "environment.json").read_text())
    return {
        "processes": found["processes"],
        "device": found["device"],
        "threads": found["threads_per_process"],
        "wall_seconds": [after[0] - before[0] for before, after in steps],
        "cpu_seconds": [after[1] - before[1] for before, after in steps],
        **(profile_of(module.main, profiler) if profiled else {}),
    }


def forget_the_last_run() -> None:
    """Accelerate keeps one state per process, and the environment says how many processes."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in rank_environment(0, 1, 0):
        os.environ.pop(name, None)


def profile_of(main, profiler: cProfile.Profile) -> dict[str, dict]:
    """What `main` called, by function, with what was called in turn included.

    `calls`: {function that main itself calls: [calls, seconds]}. `inside`: the same of functions
    that these call where they are Accelerate's own. `counts`: {any function: calls}.
    """
    code = main.__code__
    caller = (code.co_filename, code.co_firstlineno, code.co_name)
    stats = pstats.Stats(profiler).stats  # {function: (…, calls, …, {caller: (…, calls, …, s)})}
    direct = {function for function, (*_, callers) in stats.items() if caller in callers}
    ours = {function for function in direct if "accelerate" in Path(function[0]).parts}
    calls: dict[str, list] = defaultdict(lambda: [0, 0.0])  # two functions may share a name
    inside: dict[str, list] = defaultdict(lambda: [0, 0.0])
    counts: dict[str, int] = defaultdict(int)
    for function, (_, count, _, _, callers) in stats.items():
        name = name_of(function)
        counts[name] += count
        for each, (_, times, _, seconds) in callers.items():
            if each == caller or each in ours:
                row = calls[name] if each == caller else inside[f"{name_of(each)}: {name}"]
                row[0] += times
                row[1] += seconds
    return {"calls": calls, "inside": inside, "counts": counts}


def name_of(function: tuple[str, int, str]) -> str:
    """A profiled function as module.name."""
    file, _, name = function
    return f"{Path(file).stem}.{name}"


if __name__ == "__main__":
    main()
