"""Check your answer to a tutorial exercise, or show a hint.

accel-demo check                        # list the exercises, and which of them you have solved
accel-demo check 10
accel-demo check 10 --file my_answer.py
accel-demo check 10 --hint              # a first hint; --hint 2 shows the second
accel-demo check --all
"""

import os
import signal
import sys
from pathlib import Path

from accel_demo.errors import Parser, UserError
from accel_demo.lab.exercises import Exercise, all_exercises
from accel_demo.processes.cleanup import kill_tree, sigterm_raises
from accel_demo.processes.launch import start
from accel_demo.show import table
from accel_demo.wording import counted


def main(arguments: list[str]) -> int:
    """Check the chosen exercise. Return 0 if the answer is right, 1 if it is wrong."""
    options = parser().parse_args(arguments)
    exercises = all_exercises()
    if options.exercise is None:
        for flag in ("file", "hint", "answer"):
            if getattr(options, flag):
                example = f"accel-demo check 10 --{flag}{' my_answer.py' * (flag == 'file')}"
                raise UserError(f"--{flag} needs an exercise: {example}")
        return check_all(exercises) if options.all else show_list(exercises)
    if options.all:
        raise UserError("--all checks every exercise: leave out the number")
    if options.exercise not in exercises:
        known = ", ".join(exercises)
        raise UserError(f"there is no exercise {options.exercise}. Choose one of {known}.")
    exercise = exercises[options.exercise]
    if options.hint not in (None, 1, 2):
        raise UserError(f"there are two hints: --hint must be 1 or 2, got {options.hint}")
    if options.hint:
        print(f"hint {options.hint} of {len(exercise.hints)}: {exercise.hints[options.hint - 1]}")
        return 0
    if options.answer:
        print(exercise.answer.read_text(), end="")
        return 0
    return check(exercise, options.file)


def parser() -> Parser:
    parser = Parser(__doc__, prog="accel-demo check")
    parser.add_argument("exercise", nargs="?", metavar="NN", help="exercise number")
    parser.add_argument("--file", type=Path, help="your answer (default: the exercise file)")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument(
        "--hint", nargs="?", type=int, const=1, metavar="N", help="show hint 1 (default) or 2"
    )
    shown.add_argument("--answer", action="store_true", help="show our answer")
    parser.add_argument("--all", action="store_true", help="check all exercise files")
    return parser


def show_list(exercises: dict[str, Exercise]) -> int:
    rows = [[number, one.title, one.state()] for number, one in exercises.items()]
    print(table(["NN", "exercise", "state"], rows))
    print("\nThe files are in tutorials/exercises/. Check one with `accel-demo check NN`.")
    return 0


def check_all(exercises: dict[str, Exercise]) -> int:
    right = 0
    for number, exercise in exercises.items():
        print(f"{number} {exercise.title}", flush=True)
        right += check(exercise) == 0
        print(flush=True)
    print(f"{right} of {counted(len(exercises), 'exercise')} are right")
    return 0 if right == len(exercises) else 1


def check(exercise: Exercise, file: Path | None = None) -> int:
    """Run the grader on `file`, or on the exercise file. Return its exit code."""
    answer = file or exercise.file
    if not answer.is_file():
        raise UserError(f"no answer file at {answer}. Specify one with --file.")
    if answer.suffix != ".py":
        raise UserError(f"{answer} must be a Python file with a name that ends in .py")
    digest = exercise.digest()  # the learner may save the file while it is being checked
    command = [sys.executable, str(exercise.grader), str(answer)]
    grader = start(command, dict(os.environ), sys.stdout, sys.stderr, cwd=Path.cwd())
    with sigterm_raises(SystemExit(128 + signal.SIGTERM)):
        try:
            code = grader.wait()
        finally:  # after Ctrl-C or SIGTERM, the grader and the answer may still be running
            kill_tree(grader)
    if file is None and code in (0, 1):
        exercise.record(code == 0, digest)
    return code
