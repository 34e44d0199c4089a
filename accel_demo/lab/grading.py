"""Run an answer to an exercise in separate processes, and print whether it is right.

A grader is a program that launches itself again with --report. The new processes import the answer,
use it, and write one report each. The first process then judges the reports. It therefore survives
an answer that hangs, crashes or exits.

In a report, "mistake" is a sentence, or "" if the process found no mistake. "seen" lists the
observations of the process, for a judge that compares processes.
"""

import argparse
import importlib.util
import json
import os
import shlex
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from accel_demo.processes.launch import run_to_end
from accel_demo.wording import counted

TIME_LIMIT = 120  # seconds for one run of an answer, enough on a busy machine
ANSWER = "answer_to_the_exercise"  # name of the module that is imported from the learner's file
GRACE = 3  # seconds that the other ranks have to report after one rank finds a mistake


class Wrong(Exception):
    """A mistake in the answer. The message is printed after "wrong: "."""


@dataclass(frozen=True)
class Outcome:
    """Exit code, error output and reports of the processes that ran an answer.

    `exit_code` is None if the time limit was reached. `reports` maps "2-0" to the report of rank 0
    in a group of 2 processes. The oldest report comes first, because the first mistake may have
    caused the others.
    """

    exit_code: int | None
    stderr: str
    reports: dict[str, dict]
    time_limit: float


def grade(
    file: str,
    description: str | None,
    observe: Callable[..., Iterable | None],
    *,
    right: str,
    group_sizes: tuple[int, ...] = (),
    judge: Callable | None = None,
    time_limit: float = TIME_LIMIT,
    patience: float = 60,
) -> int:
    """Run the grader in `file`: parse its arguments, run or judge the answer, return the exit code.

    `observe(answer)` uses the answer in a separate process, and raises `Wrong` for a mistake. If
    `group_sizes` is given, `observe(answer, device)` runs in groups of that many connected
    processes, one group after the other. Each process may take `patience` seconds, or
    $ACCEL_DEMO_PATIENCE.

    `observe` may be a generator that yields an observation after each use of the answer. If `judge`
    is given, `judge(number, seen)` is called with the observations of all ranks after use `number`,
    and may raise `Wrong`. If there is no mistake, `right` is printed after "right: ".
    """
    options = parser_of(description).parse_args()

    def judge_answer() -> str:
        outcome = run_answer(file, options.answer, time_limit=time_limit)
        check(outcome, group_sizes or (1,), judge)
        return right

    if not options.report:
        return verdict(judge_answer)
    if not group_sizes:
        write_report(options.report, "1-0", fill_in({}, observe, options.answer))
        return 0
    from accel_demo.processes.group import run_in_group  # imports torch, which takes seconds

    patience = float(os.environ.get("ACCEL_DEMO_PATIENCE", patience))
    for size in group_sizes:
        arguments = (observe, options.answer, options.report, patience)
        run_in_group(_observe_as_rank, size, *arguments)  # exits if a rank finds a mistake
        try:
            check(Outcome(0, "", read_reports(options.report), time_limit), (size,), judge)
        except Wrong:
            break
    return 0


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser for FILE, and for the --report flag of the processes that run the answer."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("answer", type=lambda path: Path(path).resolve(), metavar="FILE")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="run FILE and report here")
    return parser


def verdict(judge: Callable[[], str]) -> int:
    """Call `judge` and print "right: " with its result, or "wrong: " with the `Wrong` it raises.

    Returns the exit code: 0 if the answer is right, 1 if it is wrong.
    """
    try:
        print(f"right: {judge()}")
    except Wrong as mistake:
        print(f"wrong: {mistake}")
        return 1
    return 0


def run_answer(
    grader: str,
    answer: Path,
    launcher: str = "python",
    flags: str = "",
    time_limit: float = TIME_LIMIT,
) -> Outcome:
    """Run `grader` with `--report` and return the outcome.

    Kills the processes that are still running after `time_limit` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = shlex.join([str(Path(grader).resolve()), str(answer), "--report", folder])
        result = run_to_end(f"{launcher} {words} {flags}", time_limit)
        return Outcome(result.returncode, result.stderr, read_reports(Path(folder)), time_limit)


def check(outcome: Outcome, group_sizes: tuple[int, ...], judge: Callable | None = None) -> None:
    """Raise `Wrong` for the first mistake, or if a process wrote no report. See `grade`."""
    passed = ""
    for size in group_sizes:
        where = f"on {counted(size, 'process')}"
        try:
            _check_group(outcome, size, judge)
        except Wrong as mistake:
            raise Wrong(f"{where} {mistake}{passed}" if len(group_sizes) > 1 else mistake) from None
        passed = f". (It is right {where}.)"
    if outcome.exit_code != 0:
        raise _early_end(outcome)


def _check_group(outcome: Outcome, size: int, judge: Callable | None) -> None:
    names = [f"{size}-{rank}" for rank in range(size)]
    missing = set(names) - set(outcome.reports)
    if judge and not missing:
        lists = [outcome.reports[name]["seen"] for name in names]
        for number, seen in enumerate(zip(*lists, strict=False)):  # shorter after a mistake
            judge(number, seen)
    if missing and "preamble.length" in outcome.stderr:  # gloo prints this and aborts
        raise Wrong("a message has more bytes than the tensor that it is received into")
    for name, report in outcome.reports.items():
        if name in names and report["mistake"]:
            raise Wrong(report["mistake"])
    if missing:
        raise _early_end(outcome)


def _early_end(outcome: Outcome) -> Wrong:
    if outcome.exit_code is None:
        hint = "is there an endless loop, or does a rank wait for another?"
        return Wrong(f"it did not end within {outcome.time_limit:g} s: {hint}")
    return Wrong(f"it ended early, with exit code {outcome.exit_code}\n{outcome.stderr}".rstrip())


def _observe_as_rank(device, observe: Callable, answer: Path, folder: Path, patience: float):
    """Use the answer on one rank and write a report. After a mistake, end the whole group."""
    import torch.distributed as dist

    rank, size, report = dist.get_rank(), dist.get_world_size(), {}
    name = f"{size}-{rank}"

    def give_up() -> None:
        if not (folder / f"{name}.json").exists():
            report["mistake"] = (
                f"rank {rank} has not finished after {patience:g} s. Do all ranks call the same "
                "collectives? If every rank sends before it receives, all ranks wait forever"
            )
            write_report(folder, name, report)
        os._exit(1)

    watch = threading.Timer(patience, give_up)
    watch.daemon = True
    watch.start()
    failure = f"rank {rank} cannot use the file"
    write_report(folder, name, fill_in(report, observe, answer, device, failure=failure))
    watch.cancel()
    # Don't use a barrier here: it could match a collective of the answer on another rank.
    deadline = time.monotonic() + (0 if report["mistake"] else patience) + GRACE
    while len(list(folder.glob(f"{size}-*.json"))) < size and time.monotonic() < deadline:
        time.sleep(0.02)
    if report["mistake"]:
        os._exit(1)


def fill_in(
    report: dict,
    observe: Callable[..., Iterable | None],
    *arguments,
    failure: str = "the file cannot be used",
) -> dict:
    """Call `observe(*arguments)`, and add its observations and its mistake to the report.

    If the learner's file raises an error, the mistake is `failure`, followed by the error.
    """
    report.update(mistake="", seen=[])
    try:
        for observation in observe(*arguments) or ():
            report["seen"].append(observation)
    except Wrong as mistake:
        report["mistake"] = str(mistake)
    except (Exception, SystemExit) as error:
        report["mistake"] = f"{failure}: {described(error)}"
    return report


def write_report(folder: Path, name: str, report: dict) -> None:
    """Write the report of one process. A process that is killed leaves no incomplete report."""
    unfinished = folder / f"{name}.unfinished"
    unfinished.write_text(json.dumps(report))
    unfinished.rename(folder / f"{name}.json")


def read_reports(folder: Path) -> dict[str, Any]:
    """Return the reports by name, oldest first."""
    files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
    return {file.stem: json.loads(file.read_text()) for file in files}


def import_answer(answer: Path) -> ModuleType:
    """Import the learner's file. Errors in the file are not caught."""
    spec = importlib.util.spec_from_file_location(ANSWER, answer)
    assert spec is not None and spec.loader is not None, f"{answer} is not a Python file"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def described(error: BaseException) -> str:
    """Format an error in one line: "ValueError: too many values (line 12 of the answer)"."""
    first_line = str(error).partition("\n")[0]
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_globals.get("__name__") == ANSWER]
    where = f" (line {lines[-1]} of the answer)" if lines else ""
    return f"{type(error).__name__}{': ' * bool(first_line)}{first_line}{where}"
