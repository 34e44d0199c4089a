"""Run a command as a user would, and record the time of each output line."""

import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accel_demo.errors import UserError
from accel_demo.processes.environment import QUIET, environment_for
from accel_demo.processes.launch import REPOSITORY, kill_tree, start

TIME_LIMIT = 2 * 60 * 60  # seconds


@dataclass(frozen=True)
class Timed:
    """Duration and output of a command. `lines` contains (seconds since the start, text) pairs."""

    lines: list[tuple[float, str]]
    seconds: float

    def first_step(self, first_line: str) -> float:
        """Return the time of the first line, which the train files print before their first step.

        Raises `RuntimeError` if the line does not begin with `first_line`, such as "1 process on
        cpu".
        """
        seconds, line = self.lines[0] if self.lines else (0.0, "")
        if not line.startswith(first_line):
            raise RuntimeError(f"the first line is {line!r} instead of {first_line!r}")
        return seconds


def run_timed(
    command: list[str],
    on_line: Callable[[str], None] = lambda line: None,
    time_limit: float = TIME_LIMIT,
    on_cpu: bool = True,
    **environment: str,
) -> Timed:
    """Run `command` in the repository's root folder, and call `on_line` with each output line.

    Programs such as `torchrun` are taken from this Python environment. `on_cpu` hides the GPUs.
    Raises `UserError` if the command fails and prints an "error: …" line. Raises `RuntimeError` if
    it fails without such a line or takes more than `time_limit` seconds.
    """
    lines: list[tuple[float, str]] = []
    kept = {"OMP_NUM_THREADS"} if on_cpu else {"OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"}
    quiet = {name: value for name, value in QUIET.items() if name not in kept}
    with tempfile.TemporaryFile("w+") as stderr:
        started_at = time.perf_counter()
        variables = environment_for({**quiet, "PYTHONUNBUFFERED": "1"}) | environment
        process: Any = start([str(word) for word in command], variables, subprocess.PIPE, stderr)
        guard = threading.Timer(time_limit, kill_tree, [process])
        guard.start()
        try:
            for line in process.stdout:
                lines.append((time.perf_counter() - started_at, line.rstrip("\n")))
                on_line(lines[-1][1])
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
    if returncode == 0:
        return Timed(lines, seconds)
    reason = f"ended with exit code {returncode}"
    if seconds >= time_limit:
        reason = "took too long"
    elif message := re.search(r"^error: (.*)$", errors, re.MULTILINE):
        raise UserError(message[1])
    raise RuntimeError(f"`{' '.join(map(str, command))}` {reason}\n{errors[-3000:]}")


def accelerate_launch(config: str, *options: str) -> list[str]:
    """Return an `accelerate launch` command that uses accelerate_configs/`config` and `options`."""
    if not (REPOSITORY / "accelerate_configs" / config).exists():
        raise UserError(
            f"accelerate_configs/{config} is missing: it is in the repository, but not in an "
            "installed package. Run this in a clone."
        )
    return ["accelerate", "launch", "--config_file", f"accelerate_configs/{config}", *options]
