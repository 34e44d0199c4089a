"""Check your answer to a tutorial exercise, or show a hint.

accel-demo check                        # list the exercises, and which of them you have solved
accel-demo check 10
accel-demo check 10 --file my_answer.py
accel-demo check 10 --hint              # a first hint; --hint 2 shows the second
accel-demo check --all

Exit code: 0 if the answer is right, 1 if it is wrong, 2 if an option is invalid, 3 if the check
itself failed, 4 if the answer did not finish in time (on a busy machine, it may still be right),
and 5 if the exercise file is unchanged. With --all: 0 if all answers are right, otherwise 1.
"""

import importlib
import sys
from pathlib import Path

from accel_demo.errors import UserError
from accel_demo.options import Parser
from accel_demo.processes.launch import REPOSITORY

GRADERS = REPOSITORY / "tutorials" / "exercises" / "graders"


def main(arguments: list[str]) -> int:
    """Check the chosen exercise, and return the exit code."""
    options = parser().parse_args(arguments)
    if not GRADERS.is_dir():
        raise UserError(
            "the exercises are not in the installed package. Clone the repository, and run "
            "`pip install -e .` there."
        )
    if str(GRADERS) not in sys.path:
        sys.path.append(str(GRADERS))
    return importlib.import_module("exercises").run(options)


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
