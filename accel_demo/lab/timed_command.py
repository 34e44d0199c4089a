"""Run a command as a user would, and record how long it takes.

`time_training` also records when a training run performs its first step and writes its metrics.
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from accel_demo.errors import ERROR_FILE, UserError
from accel_demo.processes.cleanup import kill_tree
from accel_demo.processes.environment import QUIET, environment_for
from accel_demo.processes.launch import REPOSITORY, start
from accel_demo.wording import counted

TIME_LIMIT = 2 * 60 * 60  # seconds
PAUSE = 0.005  # seconds between two looks at a run folder


@dataclass(frozen=True)
class Timed:
    """What a command has printed, and its duration."""

    printed_lines: list[str]
    seconds: float


@dataclass
class TimedRun:
    """The files in a run folder, and when they were written, in seconds since the start."""

    environment: dict = field(default_factory=dict)  # environment.json
    # when environment.json was written, which a train file does just before its first step
    first_step_seconds: float = 0.0
    metrics: list[tuple[float, dict]] = field(default_factory=list)  # lines of metrics.jsonl


def time_training(command: list, processes: int, **options) -> TimedRun:
    """Run a training command with a temporary run folder. `options` are passed to `run_timed`.

    A thread looks at the folder every `PAUSE` seconds. So each time is late by at most `PAUSE`,
    plus the time until the thread gets a CPU core.

    Raises `RuntimeError` if the number of processes that trained is not `processes`.
    """
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as thread:
        run, has_ended = TimedRun(), threading.Event()
        started_at = time.perf_counter()
        watching = thread.submit(_watch, Path(folder), run, started_at, has_ended)
        try:
            run_timed([*command, "--run-dir", folder], **options)
        finally:
            has_ended.set()
        watching.result()  # raises the thread's exception, if any
        run.environment = json.loads(Path(folder, "environment.json").read_text())
    if run.environment["processes"] != processes:
        trained = counted(run.environment["processes"], "process")
        raise RuntimeError(f"{trained} trained instead of {processes}")
    return run


def _watch(folder: Path, run: TimedRun, started_at: float, has_ended: threading.Event) -> None:
    """Add the times at which a run writes its files to `run`, until the run has ended."""
    bytes_read, is_last_look = 0, False
    while not is_last_look:
        is_last_look = has_ended.wait(PAUSE)
        if not run.first_step_seconds and (folder / "environment.json").exists():
            run.first_step_seconds = time.perf_counter() - started_at
        metrics = folder / "metrics.jsonl"
        if metrics.exists() and metrics.stat().st_size > bytes_read:
            content = metrics.read_bytes()[bytes_read:]
            seconds = time.perf_counter() - started_at
            complete = content[: content.rfind(b"\n") + 1]  # the last line may be incomplete
            bytes_read += len(complete)
            run.metrics += [(seconds, json.loads(line)) for line in complete.splitlines()]


def run_timed(
    command: list,
    show_lines: bool = False,
    time_limit: float = TIME_LIMIT,
    on_cpu: bool = True,
    **environment: str,
) -> Timed:
    """Run `command` in the repository's root folder. `show_lines` copies its output to stderr.

    Programs such as `torchrun` are taken from this Python environment. `on_cpu` hides the GPUs.
    Raises `UserError` if the command fails because of one, even under a launcher. Raises
    `RuntimeError` if it fails for a different reason, or takes more than `time_limit` seconds.
    """
    lines: list[str] = []
    kept = {"OMP_NUM_THREADS"} if on_cpu else {"OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"}
    quiet = {name: value for name, value in QUIET.items() if name not in kept}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as stderr:
        user_error = Path(folder, "user_error")
        started_at = time.perf_counter()
        changes = {**quiet, "PYTHONUNBUFFERED": "1", ERROR_FILE: str(user_error)}
        variables = environment_for(changes) | environment
        process: Any = start([str(word) for word in command], variables, subprocess.PIPE, stderr)
        guard = threading.Timer(time_limit, kill_tree, [process])
        guard.start()
        try:
            for line in process.stdout:
                lines.append(line.rstrip("\n"))
                if show_lines:
                    tqdm.write(f"  {lines[-1]}", sys.stderr)
            returncode = process.wait()
        finally:
            guard.cancel()
            if process.poll() is None:  # Ctrl-C interrupted the loop
                kill_tree(process)
                process.wait()
            process.stdout.close()
        seconds = time.perf_counter() - started_at
        stderr.seek(0)
        errors = stderr.read()
        message = user_error.read_text() if user_error.exists() else ""
    if returncode == 0:
        return Timed(lines, seconds)
    reason = f"ended with exit code {returncode}"
    if seconds >= time_limit:
        reason = "took too long"
    elif message:
        raise UserError(message)
    raise RuntimeError(f"`{' '.join(map(str, command))}` {reason}\n{errors[-3000:]}")


def accelerate_launch(config: str, *options: str) -> list[str]:
    """Return an `accelerate launch` command that uses accelerate_configs/`config` and `options`."""
    if not (REPOSITORY / "accelerate_configs" / config).exists():
        raise UserError(
            f"accelerate_configs/{config} is missing: it is in the repository, but not in an "
            "installed package. Run this in a clone."
        )
    return ["accelerate", "launch", "--config_file", f"accelerate_configs/{config}", *options]
