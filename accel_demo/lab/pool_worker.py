"""A worker process that trains once per request and times the optimizer steps.

`WorkerPool` starts this module once per rank. Each line on stdin is a JSON object with the
arguments of `run`, and each line on stdout is the result that `run` returns. The train files need
no code for the timing, because torch calls a hook after every optimizer step.
"""

import json
import os
import sys
import time
from contextlib import redirect_stderr
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, GradientState
from torch.optim.optimizer import register_optimizer_step_post_hook

from accel_demo import train, train_ddp, train_dp, train_plain
from accel_demo.config import TrainConfig
from accel_demo.lab.hosts import own_network
from accel_demo.lab.worker_pool import WorkerResult
from accel_demo.processes.environment import rank_environment

TRAIN_FILES = {
    "plain PyTorch": train_plain,
    "nn.DataParallel": train_dp,
    "raw DDP": train_ddp,
    "Accelerate": train,
}


def main() -> None:
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
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
) -> WorkerResult:
    """Train once with the train file `TRAIN_FILES[version]`."""
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
    options = () if module is train else (precision,)
    try:
        module.main(config, *options)
    finally:
        hook.remove()
        forget_the_last_run()
    environment = json.loads(Path(config.run_dir, "environment.json").read_text(encoding="utf-8"))
    return {
        "processes": environment["processes"],
        "device": environment["device"],
        "threads": environment["threads_per_process"],
        "stamps": stamps,
        "seconds_per_step": (stamps[-1] - stamps[0]) / (len(stamps) - 1),
        "network": own_network(),
    }


def forget_the_last_run() -> None:
    """Reset Accelerate's state and remove the launch variables, which describe the last run."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in (*rank_environment(0, 1, 0), "ACCELERATE_MIXED_PRECISION"):
        os.environ.pop(name, None)


if __name__ == "__main__":
    main()
