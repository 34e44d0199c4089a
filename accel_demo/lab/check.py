"""Check your answer to a tutorial exercise.

accel-demo check 10
accel-demo check 10 --file my_answer.py
"""

import os
import sys
from pathlib import Path

from accel_demo.errors import Parser, UserError
from accel_demo.processes.launch import REPOSITORY, start

EXERCISES = REPOSITORY / "tutorials" / "exercises"


def main(arguments: list[str]) -> int:
    """Run the grader of the chosen exercise. Return 0 if the answer is right, 1 if it is wrong."""
    parser = Parser(__doc__, prog="accel-demo check")
    parser.add_argument("exercise", metavar="NN", help="exercise number")
    parser.add_argument("--file", type=Path, help="your answer (default: the exercise file)")
    options = parser.parse_args(arguments)
    graders = {path.stem: path for path in (EXERCISES / "graders").glob("[0-9]*.py")}
    if not graders:
        raise UserError(
            "the exercises are not in the installed package. Clone the repository, and run "
            "`pip install -e .` there."
        )
    if options.exercise not in graders:
        known = ", ".join(sorted(graders))
        raise UserError(f"there is no exercise {options.exercise}. Choose one of {known}.")
    answer = options.file or next(EXERCISES.glob(f"{options.exercise}_*.py"), None)
    if answer is None or not answer.is_file():
        raise UserError(f"no answer file at {answer or EXERCISES}. Specify one with --file.")
    command = [sys.executable, str(graders[options.exercise]), str(answer)]
    grader = start(command, dict(os.environ), sys.stdout, sys.stderr, cwd=Path.cwd())
    try:
        return grader.wait()
    finally:
        grader.kill()  # the grader is still running if Ctrl-C interrupted `wait`
