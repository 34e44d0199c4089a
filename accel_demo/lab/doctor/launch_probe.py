"""Launch the probe with a config, within a time limit, and give what its processes answer."""

import json
import os
import re
import sys
from pathlib import Path

from accel_demo.processes.launch import run_to_end

LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]


class LaunchFailed(Exception):
    """The launcher ended with an error, or not at all."""


def launch_probe(path: Path, seconds: float = 120) -> list[dict]:
    """What each process of the launch says of itself, in the order of their ranks.

    Raises `LaunchFailed` where the launch goes wrong or takes longer than `seconds`. In the end
    nothing that was started is left.
    """
    command = [*LAUNCH, str(path), "-m", "accel_demo.lab.doctor.probe"]
    ended = run_to_end(command, seconds, environment=dict(os.environ), cwd=Path.cwd())
    if ended.returncode is None:
        raise LaunchFailed(f"no answer within {seconds} seconds; all it had started is stopped")
    lines = [line for line in ended.stdout.splitlines() if line.startswith("PROBE ")]
    answers = [json.loads(line.removeprefix("PROBE ")) for line in lines]
    if ended.returncode != 0 or not answers:
        raise LaunchFailed(cause_in(ended.stderr) or "the probe ended without an answer")
    return sorted(answers, key=lambda answer: answer["rank"])


def cause_in(stderr: str) -> str:
    """The last line that names an error of the program, not the launcher's report around it."""
    lines = [re.sub(r"^\[rank\d+\]:\s?", "", line).rstrip() for line in stderr.splitlines()]
    lines = [line for line in lines if re.search(r"\w", line)]
    report = ("CalledProcessError", "ChildFailedError")
    named = [
        line
        for line in lines
        if re.match(r"[\w.]*(error|Error|Exception): ", line)
        and not any(name in line for name in report)
    ]
    return (named or lines or [""])[-1]
