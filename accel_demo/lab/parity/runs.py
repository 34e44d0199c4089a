"""Train the tellings with the same choices in one launch, and keep the weights of each run."""

import json
import os
import sys
import threading
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from accel_demo.processes.environment import rank_environment
from accel_demo.processes.launch import free_port, spawn


@dataclass(frozen=True)
class ParityRun:
    """One training: which telling (a key of pool_worker.TELLINGS), and its share of the batch."""

    telling: str
    processes: int = 1
    accumulate: int = 1
    batch_size: int = 32  # per process and micro-batch

    @property
    def name(self) -> str:
        words = self.telling.lower().replace(".", "-").replace(" ", "-")
        return f"{words}-{self.processes}x{self.accumulate}x{self.batch_size}"


def train_all(runs: list[ParityRun], choices: dict, folder: Path) -> dict[ParityRun, dict]:
    """Train each run in a folder of its own below `folder`: its environment.json.

    `choices` are fields of TrainConfig. As many processes are started as the largest run needs; a
    smaller run has the first of them, and the others wait for the next one. Each computes on one
    thread, and on GPUs only where there is one for each. Raises `RuntimeError` where a run had
    another number of connected processes than it should.
    """
    processes = max(run.processes for run in runs)
    ports = [free_port() for _ in runs]
    orders = (runs, ports, choices, folder)
    spawn(_train, processes, *orders, stop_at_once=True)  # a run cut short is no result
    found = {}
    for run in runs:
        environment = json.loads((folder / run.name / "environment.json").read_text())
        if environment["processes"] != run.processes:
            raise RuntimeError(f"{run.name} had {environment['processes']} connected processes")
        found[run] = environment
    return found


def _train(runs: list[ParityRun], ports: list[int], choices: dict, folder: Path) -> None:
    """What each process does: the runs it has a part in, one after the other."""
    from accel_demo.config import TrainConfig
    from accel_demo.lab.pool_worker import TELLINGS, forget_the_last_run

    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _compute_the_same_each_time(processes)
    tqdm.set_lock(threading.RLock())  # its own, for several processes, outlives one that is killed
    bar = tqdm(total=len(runs), desc="training", unit="run", disable=rank > 0, file=sys.stderr)
    for run, port in zip(runs, ports, strict=True):
        if rank >= run.processes:
            continue
        forget_the_last_run()
        if run.processes > 1 or run.telling == "raw DDP":
            os.environ.update(rank_environment(rank, run.processes, port))
        else:
            os.environ["LOCAL_WORLD_SIZE"] = "1"  # as from a launcher
        fields = {**choices, "batch_size": run.batch_size, "accumulate": run.accumulate}
        config = TrainConfig(**fields, run_dir=str(folder / run.name))
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            TELLINGS[run.telling].main(config)
        bar.update()
    bar.close()
    forget_the_last_run()


def _compute_the_same_each_time(processes: int) -> None:
    """One thread, or a GPU each, and none of the ways in which a GPU adds in any order.

    Source: https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    torch.set_num_threads(1)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if torch.cuda.device_count() < processes:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # else runs of one process would take a GPU
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.backends.cudnn.allow_tf32 = False  # a bound for float32 does not hold for it
