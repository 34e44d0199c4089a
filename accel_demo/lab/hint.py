"""Show a hint for an exercise.

accel-demo hint 10
accel-demo hint 10 2                    # the second hint, which says more
"""

from accel_demo.lab.course.exercises import exercise_named
from accel_demo.options import Parser
from accel_demo.terminal import display


def main(arguments: list[str]) -> int:
    """Print the hint, and return the exit code."""
    options = make_parser().parse_args(arguments)
    hints = exercise_named(options.exercise).hints
    display(f"hint {options.hint} of {len(hints)}: {hints[options.hint - 1]}")
    if options.hint < len(hints):
        display(f"The next one: accel-demo hint {options.exercise} {options.hint + 1}")
    return 0


def make_parser() -> Parser:
    parser = Parser(__doc__, prog="accel-demo hint")
    parser.add_argument("exercise", metavar="NN", help="exercise number")
    help = "1 (default) or 2"
    parser.add_argument("hint", nargs="?", type=int, choices=(1, 2), default=1, help=help)
    return parser
