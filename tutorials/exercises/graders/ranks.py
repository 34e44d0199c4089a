"""Start the ranks of an answer as forks of a server that has already imported torch."""

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import grading

from accel_demo.processes.environment import QUIET, RANK_VARIABLES, rank_environment
from accel_demo.processes.launch import start_method

PROCESSES = multiprocessing.get_context(start_method())


def start_server(*modules: str) -> None:
    """Start the server, and wait until it has imported the modules, so that they take no time."""
    os.environ.update(QUIET)
    for name in (*RANK_VARIABLES, "GROUP_RANK"):
        os.environ.pop(name, None)
    if start_method() == "forkserver":
        PROCESSES.set_forkserver_preload(["accelerate", *modules])
    first = PROCESSES.Process(target=int)
    first.start()
    first.join()


def run_ranks(
    function: Callable,
    world_size: int,
    *arguments,
    end: float,
    is_over: Callable[[list[int | None]], bool],
) -> list[int | None]:
    """Call `function(rank, *arguments)` in a process per rank. Return the exit codes by rank.

    When the time `end` has passed, or `is_over(exit_codes)` is true, kill the processes that are
    still running. Their exit code is None.
    """
    ranks = [PROCESSES.Process(target=function, args=(n, *arguments)) for n in range(world_size)]
    for process in ranks:
        process.start()
    while True:
        time.sleep(0.02)
        exit_codes = [process.exitcode for process in ranks]
        if is_over(exit_codes) or None not in exit_codes or time.monotonic() > end:
            break
    for process in ranks:
        process.kill()
        process.join()
    return exit_codes


def begin_rank(rank: int, world_size: int, port: int) -> None:
    """Discard the answer's output, so that the result comes first, and set torchrun's variables."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(devnull, stream)
    if world_size > 1:
        os.environ.update(rank_environment(rank, world_size, port))


def end_rank(reports: Path, rank: int, world_size: int, report: dict) -> None:
    """Write the report and exit, at once after a mistake, and otherwise with the other ranks."""
    grading.write_report(reports, f"{world_size}-{rank}", report)
    if report["mistake"]:
        os._exit(1)
    wait_for_reports(reports, world_size)  # the other ranks may still need this one
    os._exit(0)


def wait_for_reports(reports: Path, world_size: int) -> None:
    grading.wait_for(lambda: len(list(reports.glob("*.json"))) == world_size)
