"""Run an answer to an exercise in separate processes, and print whether it is right.

A grader is a program that starts itself again with --report. The new processes import the answer,
run it, and write one report each. The first process only judges the reports, so it survives an
answer that hangs, crashes or exits.

In a report, "mistake" describes what is wrong with the answer, or is "" if nothing is wrong. "read"
is the heading of the section to read, or "" for the exercise's default section.
"seen" lists what the process observed, so that a judge can compare the processes. "is_late" is true
if the mistake is only that the answer has not finished in time: see `NotFinished`.

python tutorials/exercises/graders/NN.py FILE does what `accel-demo check NN --file FILE` does.
"""

import argparse
import importlib.util
import json
import os
import shlex
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from accel_demo.errors import UserError, one_line_errors
from accel_demo.files import write_whole
from accel_demo.lab.course.exercises import all_exercises
from accel_demo.lab.course.originals import ORIGINALS
from accel_demo.options import Parser
from accel_demo.processes.cleanup import adopt_orphans, kill_descendants
from accel_demo.processes.launch import run_to_end
from accel_demo.terminal import columns, fitted
from accel_demo.wording import counted

TIME_LIMIT = 120  # seconds for one run of an answer; enough even on a busy machine
ANSWER = "answer_to_the_exercise"  # module name of the learner's file
# Parts of gloo's errors if a message and the tensor that receives it have different sizes.
GLOO_SIZE_ERRORS = ("preamble.length", "Received data size")
GRACE = 3  # seconds that a rank that found a mistake waits for the other ranks' reports
BUSY = "\nIf the machine was busy, your answer may still be right: check it again when it is idle."


class Lazy:
    """A module that is imported when it is first used, because importing torch takes seconds."""

    def __init__(self, name: str):
        self.name = name

    def __getattr__(self, attribute: str):
        return getattr(importlib.import_module(self.name), attribute)


torch, dist = Lazy("torch"), Lazy("torch.distributed")


class Wrong(Exception):
    """A mistake in the answer. The message is printed after "wrong: ".

    `read` is the heading of the section to read, if it is not the exercise's default section.
    """

    def __init__(self, message: str, read: str = ""):
        super().__init__(message)
        self.read = read


class NotFinished(Wrong):
    """The answer did not finish in time. On a busy machine, this can happen to a right answer.

    The message is printed after "no verdict: ".
    """


# Mistakes that every answer with several ranks can make. `grade` accepts replacements for them.
STUCK = Wrong("Do all ranks call the same collectives, in the same order?")
SIZES_DIFFER = Wrong(
    "a rank receives a message into a tensor with a different number of bytes. Do both tensors "
    "have the same shape and dtype?"
)
# Mistakes with send and receive
STUCK_SENDING = Wrong(
    "Does every send have a matching receive? If every rank sends before it receives, all ranks "
    "wait forever"
)
NOT_AWAITED = Wrong(
    "a tensor may be used before its message has arrived: call wait() on the objects that isend "
    "and irecv return"
)


@dataclass(frozen=True)
class Outcome:
    """Exit code, stderr and reports of the processes that ran an answer.

    `exit_code` is None if the processes took too long. `reports` maps "2-0" to the report of rank 0
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
    right: str | Callable[[Path], str],
    group_sizes: tuple[int, ...] = (),
    judge: Callable | None = None,
    time_limit: float = TIME_LIMIT,
    patience: float = 60,
    stuck: Wrong = STUCK,
    sizes_differ: Wrong = SIZES_DIFFER,
) -> int:
    """Run the grader `file` with its command-line arguments, and return its exit code.

    `observe(answer)` runs in a separate process. It uses the answer, and raises `Wrong` if it finds
    a mistake. If `group_sizes` is given, a group of connected processes runs for each size instead,
    and each rank calls `observe(answer, device)`. A rank may take `patience` seconds, unless the
    environment variable ACCEL_DEMO_PATIENCE sets a different limit. If it takes longer, what the
    learner reads ends with the message of `stuck`. If a rank receives a message of the wrong size,
    `sizes_differ` is raised.

    `observe` may be a generator that yields one observation after each use of the answer. For each
    use, numbered from 0, `judge(number, seen)` compares the observations of all ranks, which are in
    `seen`, and may raise `Wrong`. If there is no mistake, "right: " and `right` are printed. If
    `right` is a function, it is called with the answer, and returns the text.
    """
    options = read(parser_of(description))

    def judge_answer() -> str:
        outcome = run_answer(file, options.answer, time_limit=time_limit)
        check(outcome, group_sizes or (1,), judge, sizes_differ)
        return right if isinstance(right, str) else right(options.answer)

    if not options.report:
        return verdict(file, judge_answer)
    if not group_sizes:
        write_report(options.report, "1-0", fill_in({}, observe, options.answer))
        return 0
    from accel_demo.processes.group import run_in_group  # slow, because it imports torch

    patience = limit("ACCEL_DEMO_PATIENCE", patience)
    for size in group_sizes:
        arguments = (observe, options.answer, options.report, patience, stuck)
        run_in_group(_observe_as_rank, size, *arguments)  # exits if a rank found a mistake
        try:
            outcome = Outcome(0, "", read_reports(options.report), time_limit)
            check(outcome, (size,), judge, sizes_differ)
        except Wrong:
            break
    return 0


def parser_of(description: str | None) -> Parser:
    """Return a parser for FILE and --report. A grader adds --report when it starts itself again."""
    parser = Parser(description)
    parser.add_argument("answer", type=lambda path: Path(path).resolve(), metavar="FILE")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="write reports to FOLDER")
    return parser


def read(parser: Parser) -> argparse.Namespace:
    """Return the options. An invalid option is reported in one line, with exit code 2."""
    with one_line_errors():
        return parser.parse_args()


def verdict(file: str, judge: Callable[[], str]) -> int:
    """Call `judge`. Print "right: " and its result, or "wrong: " and the `Wrong` that it raises.

    After a mistake, also print what to read. Processes that the answer has started and left behind
    are killed. Returns one of the exit codes that `accel-demo check --help` lists. `file` is the
    grader, graders/NN.py.
    """
    adopt_orphans()
    try:
        text, code = f"right: {judge()}", 0
    except NotFinished as late:
        text, code = f"no verdict: {late}{BUSY}{_advice(Path(file).stem, late.read)}", 4
    except Wrong as mistake:
        text, code = f"wrong: {mistake}{_advice(Path(file).stem, mistake.read)}", 1
    except Exception as error:
        is_ours = not isinstance(error, UserError)
        _print(traceback.format_exc() if is_ours else f"error: {error}\n", sys.stderr)
        text, code = "the check itself failed, so your answer was not graded", 3
    finally:
        kill_descendants(spare_resource_tracker=True)
    _print(f"{text}\n", sys.stdout)
    return code


def _print(text: str, stream) -> None:
    """Print the text, wrapped on a terminal.

    If the reader has closed the pipe, as `| head` does, discard it.
    """
    try:
        print(fitted(text, columns(stream)), end="", file=stream, flush=True)
    except BrokenPipeError:
        # Otherwise Python tries again at exit, and changes the exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _advice(number: str, heading: str) -> str:
    """Return two lines about what to read. `heading` is "" for the exercise's default section."""
    exercise = all_exercises().get(number)
    if exercise is None:
        return ""
    section = f'"{heading or exercise.heading}" in tutorials/{exercise.page.name}'
    return f"\nRead {section}.\nFor a hint: accel-demo hint {number}"


def run_answer(
    grader: str,
    answer: Path,
    launcher: str = "python",
    flags: str = "",
    time_limit: float = TIME_LIMIT,
) -> Outcome:
    """Run `grader` with `--report` and return the outcome.

    Kill the processes that are still running after `time_limit` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = shlex.join([str(Path(grader).resolve()), str(answer), "--report", folder])
        time_limit = limit("ACCEL_DEMO_TIME_LIMIT", time_limit)
        result = run_to_end(f"{launcher} {words} {flags}", time_limit, cwd=ORIGINALS)
        return Outcome(result.returncode, result.stderr, read_reports(Path(folder)), time_limit)


def limit(variable: str, default: float) -> float:
    """Return a number of seconds: the value of an environment variable, or `default`."""
    return float(os.environ.get(variable, default))


def check(
    outcome: Outcome,
    group_sizes: tuple[int, ...],
    judge: Callable | None = None,
    sizes_differ: Wrong = SIZES_DIFFER,
) -> None:
    """Raise `Wrong` if the answer has a mistake or did not finish. `grade` explains the options."""
    passed = ""
    for size in group_sizes:
        where = f"on {counted(size, 'process')}"
        with prefixed(f"{where}, " if len(group_sizes) > 1 else "", passed):
            _check_group(outcome, size, judge, sizes_differ)
        passed = f"(It is correct {where}.)"
    if outcome.exit_code != 0:
        raise _early_end(outcome)


@contextmanager
def prefixed(where: str, remark: str = "") -> Iterator[None]:
    """Put `where` before the message of a `Wrong` that the block raises, and `remark` after it."""
    try:
        yield
    except Wrong as mistake:
        end = "" if str(mistake).endswith("?") else "."
        message = f"{where}{mistake}{f'{end} {remark}' if remark else ''}"
        raise type(mistake)(message, mistake.read) from None


@contextmanager
def naming_errors(what: str) -> Iterator[None]:
    """If the block raises an error, raise a `Wrong` that begins with `what` and describes it."""
    try:
        yield
    except (Wrong, NotImplementedError):
        raise
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise Wrong(f"{what} {describe_error(error)}") from None


def _check_group(outcome: Outcome, size: int, judge: Callable | None, sizes_differ: Wrong) -> None:
    names = [f"{size}-{rank}" for rank in range(size)]
    missing = set(names) - set(outcome.reports)
    if judge and not missing:
        lists = [outcome.reports[name]["seen"] for name in names]
        for number, seen in enumerate(zip(*lists, strict=False)):  # lists end early after a mistake
            judge(number, seen)
    errors = [report["mistake"] for name, report in outcome.reports.items() if name in names]
    if missing:
        errors.append(outcome.stderr)
    if any(text in error for text in GLOO_SIZE_ERRORS for error in errors):
        raise sizes_differ
    for name, report in outcome.reports.items():
        if name in names and report["mistake"]:
            kind = NotFinished if report.get("is_late") else Wrong
            raise kind(report["mistake"], report.get("read", ""))
    if missing:
        raise _early_end(outcome)


def _early_end(outcome: Outcome) -> Wrong:
    if outcome.exit_code is None:
        hint = "is there an infinite loop, or is the answer waiting for something?"
        return NotFinished(f"it did not finish within {outcome.time_limit:g} s: {hint}")
    return Wrong(f"it exited early with exit code {outcome.exit_code}\n{outcome.stderr}".rstrip())


def _observe_as_rank(
    device, observe: Callable, answer: Path, folder: Path, patience: float, stuck: Wrong
) -> None:
    """Use the answer on one rank and write a report. If it has a mistake, exit to end the group."""
    rank, size, report = dist.get_rank(), dist.get_world_size(), {}
    name = f"{size}-{rank}"

    def give_up() -> None:
        if not (folder / f"{name}.json").exists():
            report["mistake"] = f"rank {rank} has not finished after {patience:g} s. {stuck}"
            report.update(read=stuck.read, is_late=True)
            write_report(folder, name, report)
        os._exit(1)

    watch = threading.Timer(patience, give_up)
    watch.daemon = True
    watch.start()
    failure = f"rank {rank} raised an error"
    write_report(folder, name, fill_in(report, observe, answer, device, failure=failure))
    watch.cancel()
    # A barrier could be matched with a collective that the answer calls on another rank, so poll.
    wait_for(
        lambda: len(list(folder.glob(f"{size}-*.json"))) == size,
        (0 if report["mistake"] else patience) + GRACE,
    )
    if report["mistake"]:
        os._exit(1)


def wait_for(condition: Callable[[], Any], seconds: float = float("inf")) -> None:
    """Wait until the condition is true, but at most `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def fill_in(
    report: dict,
    observe: Callable[..., Iterable | None],
    *arguments,
    failure: str = "your file raised an error",
) -> dict:
    """Call `observe(*arguments)`, and add its observations and the mistake to the report.

    If the learner's file raises an error, "mistake" is `failure`, followed by the error.
    """
    report.update(mistake="", seen=[])
    try:
        for observation in observe(*arguments) or ():
            report["seen"].append(observation)
    except Wrong as mistake:
        is_late = isinstance(mistake, NotFinished)
        report.update(mistake=str(mistake), read=mistake.read, is_late=is_late)
    except NotImplementedError as error:
        report["mistake"] = f"a function is not implemented yet{_place(error)}"
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        report["mistake"] = f"{failure}: {describe_error(error)}"
    return report


def write_report(folder: Path, name: str, report: dict) -> None:
    write_whole(folder / f"{name}.json", json.dumps(report))


def read_reports(folder: Path) -> dict[str, Any]:
    """Return {name: report} for all reports in the folder, oldest first."""
    files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}


def import_answer(answer: Path) -> ModuleType:
    """Import the learner's file. Errors in the file are not caught."""
    spec = importlib.util.spec_from_file_location(ANSWER, answer)
    assert spec is not None and spec.loader is not None, f"{answer} is not a Python file"
    module = importlib.util.module_from_spec(spec)
    vars(module)[ANSWER] = True  # see `is_in_answer`
    spec.loader.exec_module(module)
    return module


def is_in_answer(frame) -> bool:
    """Return True if the frame executes code of the learner's file."""
    return ANSWER in frame.f_globals


def call_without_collectives(function: Callable, *arguments) -> Any:
    """Return `function(*arguments)`. Raise `Wrong` if it calls a collective other than a barrier.

    Also raise it if a message is sent to or received from a rank that does not exist, or if `wait`
    was not called on a message. Process groups count their operations, so any operation that is not
    also counted here is a collective.
    """
    allowed, messages = 0, []

    def counting(name: str) -> Callable:
        method = getattr(dist.ProcessGroup, name)

        def call(group, *arguments, **options):
            nonlocal allowed
            if name in ("send", "recv"):
                check_peer(name, arguments[1], group)
            allowed += 1
            work = method(group, *arguments, **options)
            if name == "barrier":
                return work
            messages.append(WatchedWork(work))
            return messages[-1]

        return call

    def operations() -> int:
        groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
        return sum(group._get_sequence_number_for_group() for group in groups)

    before = operations()
    with ExitStack() as stack:
        for name in ("send", "recv", "recv_anysource", "barrier"):
            stack.enter_context(mock.patch.object(dist.ProcessGroup, name, counting(name)))
        returned = function(*arguments)
    if operations() - before > allowed:
        raise Wrong("it calls a collective, but only send and receive are allowed")
    if not all(message.is_awaited for message in messages):
        raise NOT_AWAITED
    return returned


def check_peer(name: str, peer: int, group) -> None:
    """Raise `Wrong` if this rank cannot exchange a message with rank `peer` of the group."""
    rank, size = group.rank(), group.size()
    action = "sends to" if name == "send" else "receives from"
    if peer == rank:
        raise Wrong(f"rank {rank} {action} itself")
    if peer not in range(size):
        ranks = f"there are only ranks 0 to {size - 1}" if size > 1 else "there is only rank 0"
        raise Wrong(f"rank {rank} {action} rank {peer}, but {ranks}")


class WatchedWork:
    """The `Work` object of a send or receive, which records whether `wait` was called."""

    def __init__(self, work):
        self.work, self.is_awaited = work, False

    def wait(self, *arguments, **options):
        self.is_awaited = True
        return self.work.wait(*arguments, **options)

    def __getattr__(self, name: str):
        return getattr(self.work, name)


def describe_error(error: BaseException, remark: str = "") -> str:
    """Format an error as one line: "ValueError: too many values (line 12 of your file)".

    `remark` is added to the error's message.
    """
    message = str(error).strip().partition("\n")[0] + remark
    return f"{type(error).__name__}{': ' * bool(message)}{message}{_place(error)}"


def _place(error: BaseException) -> str:
    """Return " (line 12 of your file)", or "" if the error did not pass through the answer."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if is_in_answer(frame)]
    return f" (line {lines[-1]} of your file)" if lines else ""


def flatten(tensors: Iterable):
    """Return all elements of the tensors, on the CPU, as one vector without a graph."""
    return torch.cat([tensor.detach().cpu().flatten() for tensor in tensors])


def vector(text: str):
    """Return the vector whose float32 values are in `text`, in hexadecimal."""
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.float32)


def largest_difference(first, second) -> float:
    """Return the largest difference of two tensors. Other shapes and NaN differ infinitely."""
    if first.shape != second.shape:
        return float("inf")
    return (first - second).abs().nan_to_num(float("inf")).max().item()


def list_ranks(ranks: Iterable[int]) -> str:
    """Return "rank 0", "ranks 0 and 1" or "ranks 0, 1 and 2"."""
    *numbers, last = map(str, sorted(ranks))
    return f"ranks {', '.join(numbers)} and {last}" if numbers else f"rank {last}"


def shorten(value, most: int = 80) -> str:
    """Return `repr(value)` in one line with at most `most` characters."""
    text = repr(value).replace("\n", " ")
    return text if len(text) <= most else f"{text[: most - 3]}..."
