"""Train with several versions of the training loop in a single launch."""

import importlib
import json
import os
import threading
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from accel_demo.config import TrainConfig
from accel_demo.lab.parity.pairs import ParityRun
from accel_demo.processes.environment import rank_environment
from accel_demo.processes.launch import free_port, spawn
from accel_demo.progress_bar import ProgressBar


def train_all(runs: list[ParityRun], config: TrainConfig, folder: Path) -> dict[ParityRun, dict]:
    """Train each run in its own subfolder, and return the contents of each environment.json.

    The run with the most processes determines how many processes are started. During a run with
    fewer processes, the other ranks wait. Each process uses one thread, or one GPU if there are
    enough GPUs. Raises `RuntimeError` if a run has the wrong number of connected processes.
    """
    processes = max(run.processes for run in runs)
    ports = [free_port() for _ in runs]
    spawn(_train, processes, runs, ports, config, folder, stop_at_once=True)
    environments = {}
    for run in runs:
        file = folder / run.name / "environment.json"
        environment = json.loads(file.read_text(encoding="utf-8"))
        if environment["processes"] != run.processes:
            raise RuntimeError(f"{run.name} ran on {environment['processes']} connected processes")
        environments[run] = environment
    return environments


def _train(runs: list[ParityRun], ports: list[int], config: TrainConfig, folder: Path) -> None:
    """Train the runs that use this rank, one after the other. Every process calls this function."""
    from accel_demo.lab.pool_worker import forget_the_last_run

    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _make_deterministic(processes)
    tqdm.set_lock(threading.RLock())  # the default lock leaks a semaphore if the process is killed
    bar = ProgressBar("training", "run", total=len(runs), is_shown=rank == 0)
    for run, port in zip(runs, ports, strict=True):
        if rank >= run.processes:
            continue
        forget_the_last_run()
        if run.processes > 1 or run.script == "train_ddp":
            os.environ.update(rank_environment(rank, run.processes, port))
        else:
            os.environ["LOCAL_WORLD_SIZE"] = "1"  # as a launcher does, to avoid Apple's GPU
        script = importlib.import_module(f"accel_demo.{run.script}")
        run_dir = str(folder / run.name)
        share = {"batch_size": run.batch_size, "accumulate": run.accumulate}
        with (
            open(os.devnull, "w", encoding="utf-8") as nowhere,
            redirect_stdout(nowhere),
            redirect_stderr(nowhere),
        ):
            script.main(replace(config, **share, run_dir=run_dir))
        bar.update()
    bar.close()
    forget_the_last_run()


def _make_deterministic(processes: int) -> None:
    """Use one thread or one GPU per process, and only deterministic GPU algorithms.

    Source: https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    torch.set_num_threads(1)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if torch.cuda.device_count() < processes:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # otherwise only some runs would use GPUs
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.backends.cudnn.allow_tf32 = False  # `BOUND` assumes float32 precision
