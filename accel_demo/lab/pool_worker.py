"""One process that trains again and again on command, and tells how long the steps took.

worker_pool.py starts one for each rank. A line on stdin is a run, a line on stdout its answer, both
as JSON. The train files run as they are: torch calls `note` after every optimizer step.
"""

import cProfile
import json
import os
import pstats
import sys
import time
from collections import defaultdict
from contextlib import nullcontext, redirect_stderr
from pathlib import Path

import accelerate
import torch
from accelerate.state import AcceleratorState, GradientState
from torch.optim.optimizer import register_optimizer_step_post_hook

from accel_demo import train, train_ddp, train_dp, train_plain
from accel_demo.config import TrainConfig
from accel_demo.lab.step_parts import timed_parts
from accel_demo.processes.environment import rank_environment

TELLINGS = {
    "plain PyTorch": train_plain,
    "nn.DataParallel": train_dp,
    "raw DDP": train_ddp,
    "Accelerate": train,
}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # whatever else is printed, by C++ too, is no answer
        for line in sys.stdin:
            with redirect_stderr(nowhere):
                answer = run(**json.loads(line))
            print(json.dumps(answer), file=answers, flush=True)


def run(
    telling: str,
    choices: dict,
    precision: str = "no",
    rank: int = 0,
    world_size: int = 1,
    port: int = 0,
    on_cpu: bool = False,
    warm_up: int = 1,
    watched: str = "",
) -> dict:
    """Train once. `stamps` are the seconds at which the steps from `warm_up` on ended.

    `seconds_per_step` is their mean distance. `processes` is how many were connected, as the run
    itself found. If `watched` is "parts", `parts` is what `timed_parts` yields; if it is "profile",
    the answer also holds the dictionaries of `profile_of`.
    """
    forget_the_last_run()
    if world_size > 1 or telling == "raw DDP":
        os.environ.update(rank_environment(rank, world_size, port))
    elif on_cpu:
        os.environ["LOCAL_WORLD_SIZE"] = "1"  # as from a launcher: then no run takes Apple's GPU
    os.environ["ACCELERATE_MIXED_PRECISION"] = precision
    config, module = TrainConfig(**choices), TELLINGS[telling]
    steps, stamps = 0, []

    def note(optimizer, arguments, keywords):
        nonlocal steps
        steps += 1
        if steps in (warm_up, config.max_steps) and torch.accelerator.is_available():
            torch.accelerator.synchronize()  # a GPU computes while Python goes on
        if steps >= warm_up:
            stamps.append(time.perf_counter())

    hook = register_optimizer_step_post_hook(note)
    profiler = cProfile.Profile()
    options = () if module is train else (precision,)
    try:
        with timed_parts() if watched == "parts" else nullcontext([]) as parts:
            if watched == "profile":
                profiler.runcall(module.main, config, *options)
            else:
                module.main(config, *options)
    finally:
        hook.remove()
        forget_the_last_run()
    found = json.loads(Path(config.run_dir, "environment.json").read_text())
    return {
        "processes": found["processes"],
        "device": found["device"],
        "threads": found["threads_per_process"],
        "stamps": stamps,
        "seconds_per_step": (stamps[-1] - stamps[0]) / (len(stamps) - 1),
        "parts": parts,
        **(profile_of(profiler) if watched == "profile" else {}),
    }


def forget_the_last_run() -> None:
    """Accelerate keeps one state per process, and the environment says how many processes."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in (*rank_environment(0, 1, 0), "ACCELERATE_MIXED_PRECISION"):
        os.environ.pop(name, None)


def profile_of(profiler: cProfile.Profile) -> dict:
    """Return what Accelerate's functions spend their time on, by function.

    `inside`: {function, or "function: what it calls": [calls, seconds]}, each row without what
    other rows have. `counts`: {any function: calls}.
    """
    library = str(Path(accelerate.__file__).parent)
    # {function: (_, calls, own, _, {caller: (calls, …, seconds)})}
    stats = vars(pstats.Stats(profiler))["stats"]
    ours = {function for function in stats if function[0].startswith(library)}
    inside: dict[str, list] = defaultdict(lambda: [0, 0.0])  # two functions may share a name
    counts: dict[str, int] = defaultdict(int)
    for function, (_, count, own, _, callers) in stats.items():
        name = name_of(function)
        counts[name] += count
        rows = [(f"{name}, its own lines", count, own)] if function in ours else []
        for caller, (times, _, _, seconds) in callers.items():
            if caller in ours and function not in ours:
                rows.append((f"{name_of(caller)}: {name}", times, seconds))
        for row, times, seconds in rows:
            inside[row][0] += times
            inside[row][1] += seconds
    return {"inside": inside, "counts": counts}


def name_of(function: tuple[str, int, str]) -> str:
    """A profiled function as package/module.name: both torch and Accelerate have an optimizer."""
    file, _, name = function
    library = str(Path(accelerate.__file__).parent)
    return f"{'accelerate/' if file.startswith(library) else ''}{Path(file).stem}.{name}"


if __name__ == "__main__":
    main()
