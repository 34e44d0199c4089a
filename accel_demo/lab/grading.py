"""Run an answer to an exercise in separate processes, and print whether it is right.

A grader is a program that starts itself again. `grader FILE` judges the answer in FILE: it runs
`grader FILE --report FOLDER`, whose processes import the answer, use it, and write one report each.
So the grader survives an answer that hangs, crashes or exits.

The key "mistake" of a report is a sentence, or "" if the process has found no mistake. The key
"seen" is a list of what the process observed, for a judge that compares the processes.
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

TIME_LIMIT = 120  # seconds for one start of a grader, also on a busy machine
ANSWER = "answer_to_the_exercise"  # name of the module that the learner's file becomes
GRACE = 3  # seconds in which the other ranks may still report after a mistake on one rank


class Wrong(Exception):
    """A mistake in the answer: the sentence to print after "wrong: "."""


@dataclass(frozen=True)
class Outcome:
    """The end of the processes that ran an answer. `exit_code` is None at the time limit.

    `reports` maps "2-0" to the report of rank 0 in a group of 2 processes. They are in the order in
    which they were written: the first mistake may be the cause of the others.
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
    """Be the grader `file`: parse its command line, run or judge the answer, return the exit code.

    `observe(answer)` uses the answer in a separate process, and raises `Wrong` for a mistake. With
    `group_sizes`, `observe(answer, device)` does this in groups of that many connected processes,
    one group after the other. Each may take `patience` seconds, or $ACCEL_DEMO_PATIENCE.
    `observe` may be a generator that yields what it observed at each use of the answer. Then
    `judge(number, seen)` gets what the ranks of a group yielded at use `number`, and may raise
    `Wrong`. If nothing is wrong, `right` is printed after "right: ".
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
    from accel_demo.processes.group import run_in_group  # it imports torch, which takes seconds

    patience = float(os.environ.get("ACCEL_DEMO_PATIENCE", patience))
    for size in group_sizes:
        arguments = (observe, options.answer, options.report, patience)
        run_in_group(_observe_as_rank, size, *arguments)  # exits if one of them finds a mistake
        try:
            check(Outcome(0, "", read_reports(options.report), time_limit), (size,), judge)
        except Wrong:
            break
    return 0


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that takes FILE and, for the processes that run the answer, --report."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("answer", type=lambda path: Path(path).resolve(), metavar="FILE")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="run FILE and report here")
    return parser


def verdict(judge: Callable[[], str]) -> int:
    """Print "right: " and what `judge` returns, or "wrong: " and the `Wrong` that it raises.

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
    """Start `grader` with `--report`, wait until it ends, and return what its processes reported.

    Processes that are still running after `time_limit` seconds are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = shlex.join([str(Path(grader).resolve()), str(answer), "--report", folder])
        result = run_to_end(f"{launcher} {words} {flags}", time_limit)
        return Outcome(result.returncode, result.stderr, read_reports(Path(folder)), time_limit)


def check(outcome: Outcome, group_sizes: tuple[int, ...], judge: Callable | None = None) -> None:
    """Raise `Wrong` for the first mistake, or if a process did not report. See `grade`."""
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
        for number, seen in enumerate(zip(*lists, strict=False)):  # up to the first mistake
            judge(number, seen)
    if missing and "preamble.length" in outcome.stderr:  # gloo's words, then it ends the process
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
    """Report as one process of a group. If it finds a mistake, the whole group ends."""
    import torch.distributed as dist

    rank, size, report = dist.get_rank(), dist.get_world_size(), {}
    name = f"{size}-{rank}"

    def give_up() -> None:
        if not (folder / f"{name}.json").exists():
            report["mistake"] = (
                f"rank {rank} has not finished after {patience:g} s. Do all ranks call the same "
                "collectives? If all of them first send, they wait for each other forever"
            )
            write_report(folder, name, report)
        os._exit(1)

    watch = threading.Timer(patience, give_up)
    watch.daemon = True
    watch.start()
    failure = f"rank {rank} cannot use the file"
    write_report(folder, name, fill_in(report, observe, answer, device, failure=failure))
    watch.cancel()
    # Until all have reported, a collective of ours could meet one of the answer on another rank.
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
    """Call `observe(*arguments)`, and put what it yields and its mistake into the report.

    `failure` introduces the error that the learner's file raises.
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
    """Write the report of one process. The file appears complete, even if the process is killed."""
    unfinished = folder / f"{name}.unfinished"
    unfinished.write_text(json.dumps(report))
    unfinished.rename(folder / f"{name}.json")


def read_reports(folder: Path) -> dict[str, Any]:
    """Return the reports by name, in the order in which they were written."""
    files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
    return {file.stem: json.loads(file.read_text()) for file in files}


def import_answer(answer: Path) -> ModuleType:
    """Import the learner's file. Raises whatever the file raises."""
    spec = importlib.util.spec_from_file_location(ANSWER, answer)
    assert spec is not None and spec.loader is not None, f"{answer} is not a Python file"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def described(error: BaseException) -> str:
    """Return the error in one line: "ValueError: too many values (line 12 of the answer)"."""
    first_line = str(error).partition("\n")[0]
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_globals.get("__name__") == ANSWER]
    where = f" (line {lines[-1]} of the answer)" if lines else ""
    return f"{type(error).__name__}{': ' * bool(first_line)}{first_line}{where}"
