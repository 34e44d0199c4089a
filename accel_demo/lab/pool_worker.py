"""A worker process that trains once per request and times the optimizer steps.

`WorkerPool` starts this module once per rank. Each line on stdin is a JSON object with the
arguments of `run`, and each line on stdout is the result that `run` returns. The train files need
no code for the timing, because torch calls a hook after every optimizer step.
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
from accel_demo.lab.hosts import own_network
from accel_demo.lab.step_parts import timed_parts
from accel_demo.lab.worker_pool import WorkerResult
from accel_demo.processes.environment import rank_environment

TRAIN_FILES = {
    "plain PyTorch": train_plain,
    "nn.DataParallel": train_dp,
    "raw DDP": train_ddp,
    "Accelerate": train,
}


def main() -> None:
    results = os.fdopen(os.dup(1), "w")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # discard all other output, even from C++
        for line in sys.stdin:
            with redirect_stderr(nowhere):
                result = run(**json.loads(line))
            print(json.dumps(result), file=results, flush=True)


def run(
    version: str,
    choices: dict,
    precision: str = "no",
    rank: int = 0,
    world_size: int = 1,
    port: int = 0,
    address: str = "127.0.0.1",
    on_cpu: bool = False,
    warm_up: int = 1,
    watched: str = "",
) -> WorkerResult:
    """Train once with the train file `TRAIN_FILES[version]`.

    `watched` is "parts" to time the parts of each step, "profile" to profile the run, or "".
    """
    forget_the_last_run()
    if world_size > 1 or version == "raw DDP":
        os.environ.update(rank_environment(rank, world_size, port) | {"MASTER_ADDR": address})
    elif on_cpu:
        os.environ["LOCAL_WORLD_SIZE"] = "1"  # as a launcher does, so that no run uses Apple's GPU
    os.environ["ACCELERATE_MIXED_PRECISION"] = precision
    config, module = TrainConfig(**choices), TRAIN_FILES[version]
    steps, stamps = 0, []

    def record_step(optimizer, arguments, keywords):
        nonlocal steps
        steps += 1
        if steps in (warm_up, config.max_steps) and torch.accelerator.is_available():
            torch.accelerator.synchronize()  # wait for asynchronous kernels
        if steps >= warm_up:
            stamps.append(time.perf_counter())

    hook = register_optimizer_step_post_hook(record_step)
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
    environment = json.loads(Path(config.run_dir, "environment.json").read_text())
    inside, counts = profile_of(profiler) if watched == "profile" else ({}, {})
    return {
        "processes": environment["processes"],
        "device": environment["device"],
        "threads": environment["threads_per_process"],
        "stamps": stamps,
        "seconds_per_step": (stamps[-1] - stamps[0]) / (len(stamps) - 1),
        "network": own_network(),
        "parts": parts,
        "inside": inside,
        "counts": counts,
    }


def forget_the_last_run() -> None:
    """Reset Accelerate's state and remove the launch variables, which describe the last run."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in (*rank_environment(0, 1, 0), "ACCELERATE_MIXED_PRECISION"):
        os.environ.pop(name, None)


def profile_of(profiler: cProfile.Profile) -> tuple[dict[str, list], dict[str, int]]:
    """Return the time spent in Accelerate's functions, and how often each function was called.

    Each value of the first dict is [calls, seconds]. The key "function, its own lines" is for the
    time in one of Accelerate's functions, without the functions that it calls. "caller: function"
    is for the time in another package's function when Accelerate's function `caller` calls it.
    """
    # stats: {function: (_, calls, own seconds, _, {caller: (calls, …, seconds)})}
    stats = vars(pstats.Stats(profiler))["stats"]
    library = str(Path(accelerate.__file__).parent)

    def name_of(function: tuple[str, int, str]) -> str:
        # Add a prefix, because both torch and Accelerate have a module named optimizer.
        file, _, name = function
        return f"{'accelerate/' if file.startswith(library) else ''}{Path(file).stem}.{name}"

    from_accelerate = {function for function in stats if function[0].startswith(library)}
    inside: dict[str, list] = defaultdict(lambda: [0, 0.0])  # sums over functions with equal names
    counts: dict[str, int] = defaultdict(int)
    for function, (_, calls, own_seconds, _, callers) in stats.items():
        name = name_of(function)
        counts[name] += calls
        rows = [(f"{name}, its own lines", calls, own_seconds)]
        if function not in from_accelerate:
            rows = [
                (f"{name_of(caller)}: {name}", times, seconds)
                for caller, (times, _, _, seconds) in callers.items()
                if caller in from_accelerate
            ]
        for row, times, seconds in rows:
            inside[row][0] += times
            inside[row][1] += seconds
    return inside, counts


if __name__ == "__main__":
    main()
