"""Start a command as a user types it, and note when each line of its output comes."""

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
    """`lines` are (seconds since the command was started, text); `seconds` is until its end."""

    lines: list[tuple[float, str]]
    seconds: float

    def first_step(self, first_line: str) -> float:
        """Seconds to the first line: a train file prints it right before its first step.

        Raises `RuntimeError` where it does not begin with `first_line`: then another number of
        processes was started than asked for.
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
    """Run `command` from the repository's root to its end. `on_line` gets each line as it comes.

    `python`, `accelerate` and `torchrun` are those of this environment. Where the command fails,
    its "error: …" line is raised as `UserError`, anything else as `RuntimeError`; so is a command
    that takes more than `time_limit` seconds. `on_cpu` hides the GPUs from it.
    """
    lines: list[tuple[float, str]] = []
    with tempfile.TemporaryFile("w+") as stderr:
        started_at = time.perf_counter()
        variables = {**_environment(on_cpu), **environment}
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
            if process.poll() is None:  # Ctrl-C
                kill_tree(process)
                process.wait()
            process.stdout.close()
        seconds = time.perf_counter() - started_at
        stderr.seek(0)
        said = stderr.read()
    if returncode != 0:
        _raise_failure(command, returncode, said, seconds >= time_limit)
    return Timed(lines, seconds)


def accelerate_launch(config: str, *options: str) -> list[str]:
    """The start of a command line: `accelerate launch` with a file of accelerate_configs/."""
    if not (REPOSITORY / "accelerate_configs" / config).exists():
        raise UserError(
            f"accelerate_configs/{config} is missing: that folder is part of the repository, not "
            "of an installed package; run this in a clone"
        )
    return ["accelerate", "launch", "--config_file", f"accelerate_configs/{config}", *options]


def _environment(on_cpu: bool) -> dict[str, str]:
    """The user's own, with lines that come as they are printed."""
    own = {"OMP_NUM_THREADS"} if on_cpu else {"OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"}
    quiet = {name: value for name, value in QUIET.items() if name not in own}
    return environment_for({**quiet, "PYTHONUNBUFFERED": "1"})


def _raise_failure(command: list[str], returncode: int, said: str, too_long: bool) -> None:
    text = " ".join(map(str, command))
    for line in said.splitlines():
        if line.startswith("error: ") and not too_long:
            raise UserError(line.removeprefix("error: "))
    reason = "took too long" if too_long else f"ended with exit code {returncode}"
    raise RuntimeError(f"`{text}` {reason}\n{said[-3000:]}")
