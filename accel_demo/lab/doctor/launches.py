"""Launch the probe with a launch config, and collect the answers of its processes."""

import json
import os
import re
import sys
from pathlib import Path

from accel_demo.lab.doctor.launch_config import ProbeAnswer
from accel_demo.processes.launch import run_to_end

LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
TIME_LIMIT = 120  # seconds


class LaunchFailed(Exception):
    """Raised if a launch fails or times out."""


def launch_probe(
    path: Path, seconds: float = TIME_LIMIT, flags: tuple[str, ...] = (), plain: bool = False
) -> list[ProbeAnswer]:
    """Launch the probe with a config, and return its processes' answers, sorted by rank.

    Only the processes on this machine answer. `flags` are passed to the launcher. If `plain` is
    True, the probe creates a plain `Accelerator()`. All launched processes have exited when this
    function returns or raises.

    Raises `LaunchFailed` if the launch fails or takes longer than `seconds`.
    """
    command = [*LAUNCH, str(path), *flags, "-m", "accel_demo.lab.doctor.probe"]
    command += ["--plain"] if plain else []
    ended = run_to_end(command, seconds, environment=dict(os.environ), cwd=Path.cwd())
    if ended.returncode is None:
        raise LaunchFailed(f"no answer within {seconds} seconds, so all processes were stopped")
    lines = [line for line in ended.stdout.splitlines() if line.startswith("PROBE ")]
    answers = [ProbeAnswer(**json.loads(line.removeprefix("PROBE "))) for line in lines]
    if ended.returncode != 0 or not answers:
        raise LaunchFailed(cause_in(ended.stderr) or "the test program exited without an answer")
    return sorted(answers, key=lambda answer: answer.rank)


def launch_plain(
    path: Path, answers: list[ProbeAnswer], flags: tuple[str, ...]
) -> list[ProbeAnswer] | str:
    """Return the answers of a second launch, in which the probe creates a plain `Accelerator()`.

    Returns `answers` if they must be the same, and a line with the reason if the launch fails.
    """
    if all(answer.is_plain for answer in answers):
        return answers
    try:
        return launch_probe(path, flags=flags, plain=True)
    except LaunchFailed as failure:
        return f"the launch failed: {failure}"


def flags_for(config: dict) -> tuple[str, ...]:
    """Return the flags with which `accelerate launch` uses the config's values, not the file's.

    The environment or flags of doctor may have replaced them: see `read_config`.
    """
    names = "num_machines machine_rank num_processes main_process_ip main_process_port".split()
    values = {name: config[name] for name in names if config.get(name) is not None}
    return tuple(word for name, value in values.items() for word in (f"--{name}", str(value)))


def cause_in(stderr: str) -> str:
    """Return the last error message of the launched program, ignoring the launcher's own errors."""
    lines = [re.sub(r"^\[rank\d+\]:\s?", "", line).rstrip() for line in stderr.splitlines()]
    lines = [line for line in lines if re.search(r"\w", line)]
    errors = [
        line
        for line in lines
        if re.match(r"[\w.]*(Error|Exception): ", line)
        and not re.search("CalledProcessError|ChildFailedError", line)
    ]
    return (errors or lines or [""])[-1]
