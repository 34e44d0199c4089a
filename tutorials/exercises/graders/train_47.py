"""Stand in for train.py in the jobs of exercise 47: report how this process was started, and train.

The grader copies this file to the folder of the jobs.
"""

import json
import os
import runpy
import sys
import time
from pathlib import Path

import psutil

from accel_demo.files import write_whole

UNKNOWN = "unknown"
STOPPED = "runs/stopped"  # the run that gets a signal, so it must not end too early
SECONDS_PER_STEP = 0.1  # of this run, before it is stopped
# A launcher's options with the address at which the launchers meet, and with the port
PLACES = [
    ("rdzv-endpoint", ""),  # has both
    ("main-process-ip", "main-process-port"),
    ("master-addr", "master-port"),
]


def main() -> None:
    variable = {**dict.fromkeys(("RANK", "WORLD_SIZE", "SLURMD_NODENAME"), ""), **os.environ}
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", 0))
    has_launcher = "TORCHELASTIC_RUN_ID" in os.environ
    address, port = place_of_launchers() if has_launcher else place_of_processes()
    report = {
        "restarts": restarts,
        "rank": variable["RANK"],
        "world_size": variable["WORLD_SIZE"],
        "node": variable["SLURMD_NODENAME"],
        "tasks": int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)),
        "nodes": int(os.environ.get("SLURM_STEP_NUM_NODES", 1)),
        "has_launcher": has_launcher,
        "address": address,
        "port": port,
    }
    folder = Path(__file__).parent / "reports" / os.environ["SLURM_JOB_ID"]
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / f"{restarts}-{report['node']}-{os.getpid()}.json", json.dumps(report))
    if STOPPED in sys.argv and restarts == 0:
        slow_down()
    runpy.run_module("accel_demo.train", run_name="__main__")


def place_of_processes() -> tuple[str, str]:
    """Return the address and the port at which processes without a launcher meet."""
    return os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")


def place_of_launchers() -> tuple[str, str]:
    """Return the address and the port at which the launchers meet, as far as they are known."""
    # torchrun reads an option that is not on its command line from a variable.
    options = {
        name.removeprefix("PET_").lower().replace("_", "-"): value
        for name, value in os.environ.items()
        if name.startswith("PET_")
    }
    words = psutil.Process(os.getppid()).cmdline()
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            options[name.replace("_", "-")] = value if equals else following
    for address, port in PLACES:
        if options.get(address):
            address, port, *_ = f"{options[address]}:{options.get(port, '')}".split(":")
            return address, port or UNKNOWN
    return UNKNOWN, UNKNOWN


def slow_down() -> None:
    """Make each step take at least `SECONDS_PER_STEP`."""
    from accel_demo.run.run import Run

    finish_step = Run.finish_step

    def finish_slowly(run: Run, learning_rate):
        time.sleep(SECONDS_PER_STEP)
        return finish_step(run, learning_rate)

    Run.finish_step = finish_slowly


if __name__ == "__main__":
    main()
