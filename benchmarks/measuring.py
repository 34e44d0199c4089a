"""The parts that the benchmarks share: measuring in turns, and timing training runs."""

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from accel_demo.errors import one_line_errors
from accel_demo.lab import machine
from accel_demo.lab.bench.command import run_benchmark
from accel_demo.processes.launch import run_to_end
from accel_demo.wording import counted

CPU_LAUNCH = "accelerate launch --config_file accelerate_configs/cpu.yaml"
REPOSITORY = Path(__file__).resolve().parent.parent
TIME_LIMIT = 2 * 60 * 60  # seconds


def main() -> None:
    """Run the script that was started, as `run_benchmark` describes it."""
    # The launchers' defaults differ, so set this for every command that the script starts.
    os.environ.setdefault("OMP_NUM_THREADS", str(machine.usable_cores()))
    program = f"python benchmarks/{Path(sys.argv[0]).name}"
    with one_line_errors():
        run_benchmark(sys.modules["__main__"], program, sys.argv[1:])


def in_turns(
    sides: Mapping[str, Callable[[int], Any]], repeats: int, description: str
) -> dict[str, list[Any]]:
    """Measure every side once per repetition, in a new random order each time.

    A temporary slowdown of the machine then affects all sides. Each side is called with the number
    of the repetition, which it can use as a seed.
    """
    results = {name: [] for name in sides}
    total = repeats * len(sides)
    with tqdm(total=total, desc=description, unit="measurement", leave=False, disable=None) as bar:
        for repeat in range(repeats):
            for name in random.Random(repeat).sample(list(sides), len(sides)):
                results[name].append(sides[name](repeat))
                bar.update()
    return results


@dataclass(frozen=True)
class FinishedRun:
    """What a training run wrote to its folder, and when, in seconds from its start."""

    first_step_seconds: float  # when environment.json was written, just before the first step
    end_seconds: float  # when the last line of metrics.jsonl was written
    test_accuracy: float  # in that line
    threads: int  # per process


def train(command: list, processes: int = 1) -> FinishedRun:
    """Run a training command to its end, on the CPU, in the repository's root folder.

    Raises `RuntimeError` if the command fails, or trains in a different number of processes.
    """
    with tempfile.TemporaryDirectory() as name:
        started_at, folder = time.time(), Path(name)
        run_command([*command, "--run-dir", folder])
        written, metrics = folder / "environment.json", folder / "metrics.jsonl"
        environment = json.loads(written.read_text(encoding="utf-8"))
        run = FinishedRun(
            written.stat().st_mtime - started_at,
            metrics.stat().st_mtime - started_at,
            round(
                json.loads(metrics.read_text(encoding="utf-8").splitlines()[-1])["test_accuracy"], 4
            ),
            environment["threads_per_process"],
        )
    if (environment["processes"], environment["device"]) != (processes, "cpu"):
        actual = counted(environment["processes"], "process")
        raise RuntimeError(f"{actual} on {environment['device']} trained, not {processes} on cpu")
    return run


def run_command(command: list) -> str:
    """Run a command, and return what it prints. Raises `RuntimeError` if it fails."""
    words, threads = [str(word) for word in command], os.environ["OMP_NUM_THREADS"]
    result = run_to_end(words, TIME_LIMIT, cwd=REPOSITORY, OMP_NUM_THREADS=threads)
    if result.returncode != 0:
        raise RuntimeError(f"{words} returned {result.returncode}\n{result.stderr[-3000:]}")
    return result.stdout
