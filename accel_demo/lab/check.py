"""Check your answer to an exercise.

accel-demo check                        # list the exercises, and which of them you have solved
accel-demo check 10
accel-demo check 10 --watch             # check again whenever you save the file, until it is right
accel-demo check 10 --file my_answer.py
accel-demo check --all

Exit code: 0 if the answer is right, 1 if it is wrong, 2 if an option is invalid, 3 if the check
itself failed, 4 if the answer did not finish in time (on a busy machine, it may still be right),
and 5 if the exercise file is unchanged. With --all: 0 if all answers are right, otherwise 1.
"""

import os
import signal
import sys
import time
from pathlib import Path

from accel_demo.errors import UserError, output_may_be_closed
from accel_demo.lab.course.exercises import Exercise, all_exercises, exercise_named
from accel_demo.lab.course.folder import Course, digest_of, this_course
from accel_demo.options import Parser
from accel_demo.processes.cleanup import kill_tree, sigterm_raises
from accel_demo.processes.launch import start
from accel_demo.show import table
from accel_demo.terminal import display
from accel_demo.wording import counted

POLL_INTERVAL = 0.3  # seconds between two looks at a watched file


def main(arguments: list[str]) -> int:
    """Check the chosen exercise, and return the exit code."""
    options = make_parser().parse_args(arguments)
    if options.exercise is None:
        for flag in ("file", "watch"):
            if getattr(options, flag):
                example = f"accel-demo check 10 --{flag}{' my_answer.py' * (flag == 'file')}"
                raise UserError(f"--{flag} needs an exercise: {example}")
        return check_all(this_course()) if options.all else show_list(this_course())
    if options.all:
        raise UserError("--all checks every exercise: leave out the number")
    exercise = exercise_named(options.exercise)
    course = None if options.file else this_course()
    file = course.exercise_file(exercise) if course else options.file
    if not file.is_file():
        advice = f"Restore it with `accel-demo reset {exercise.number}`." if course else ""
        raise UserError(f"there is no file {file}. {advice}".removesuffix(". "))
    if file.suffix != (suffix := exercise.original.suffix):
        raise UserError(f"{file} must be a file with a name that ends in {suffix}")
    return watch(exercise, file, course) if options.watch else check(exercise, file, course)


def make_parser() -> Parser:
    parser = Parser(__doc__, prog="accel-demo check")
    parser.add_argument("exercise", nargs="?", metavar="NN", help="exercise number")
    parser.add_argument("--file", type=Path, help="your answer (default: the exercise file)")
    help = "check again whenever you save the file, until the answer is right"
    parser.add_argument("--watch", action="store_true", help=help)
    parser.add_argument("--all", action="store_true", help="check all exercise files")
    return parser


def show_list(course: Course) -> int:
    rows = [[number, one.title, course.state(one)] for number, one in all_exercises().items()]
    display(table(["NN", "exercise", "state"], rows))
    display("\nThe files are in tutorials/exercises/. Check one with `accel-demo check NN`.")
    return 0


def check_all(course: Course) -> int:
    exercises, right = all_exercises(), 0
    for number, exercise in exercises.items():
        display(f"{number} {exercise.title}")
        file = course.exercise_file(exercise)
        if file.exists():
            right += check(exercise, file, course) == 0
        else:
            display(f"missing: {file}. Restore it: accel-demo reset {number}")
        display()
    display(f"{right} of {counted(len(exercises), 'exercise')} are right")
    return 0 if right == len(exercises) else 1


def watch(exercise: Exercise, file: Path, course: Course | None) -> int:
    """Check the file now and whenever it is saved, until the answer is right. Return 0."""
    while True:
        checked = saved_digest(file)
        if check(exercise, file, course) == 0:
            return 0
        display(f"\nwaiting until you save {file.name} (stop with Ctrl-C) …")
        while saved_digest(file) == checked:
            time.sleep(POLL_INTERVAL)
        display()


def saved_digest(file: Path) -> str:
    """Return the file's digest, once it is there and an editor has finished writing it."""
    digest = None
    while True:
        try:
            before, digest = digest, digest_of(file)
        except OSError:  # some editors delete the file before they write the new one
            digest = None
        else:
            if digest == before:
                return digest
        time.sleep(POLL_INTERVAL / 2)


def check(exercise: Exercise, file: Path, course: Course | None) -> int:
    """Run the grader on the file, store the result in the course, and return the exit code."""
    if not exercise.is_started(file):
        with output_may_be_closed():  # the exit code stays the same
            display(f"not started: {file.name} is unchanged. Its first lines describe the task.")
            display(f"For a hint: accel-demo hint {exercise.number}")
        return 5
    digest = digest_of(file)  # the learner may save the file while it is being checked
    command = [sys.executable, str(exercise.grader), str(file)]
    grader = start(command, dict(os.environ), sys.stdout, sys.stderr)
    with sigterm_raises(SystemExit(128 + signal.SIGTERM)):
        try:
            code = grader.wait()
        finally:  # after Ctrl-C or SIGTERM, the grader and the answer may still be running
            kill_tree(grader)
    if course and code in (0, 1):
        course.record(exercise, code == 0, digest)
    if course and code == 0:
        try:
            display(f"Our answer: accel-demo answer {exercise.number}")
        except BrokenPipeError:  # otherwise Python tries again at exit, and changes the exit code
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code
