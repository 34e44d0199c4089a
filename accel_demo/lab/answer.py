"""Print our answer to an exercise that you have solved.

accel-demo answer 10
accel-demo answer 10 --give-up          # even if you have not solved it
"""

from accel_demo.errors import UserError
from accel_demo.lab.course.exercises import exercise_named
from accel_demo.lab.course.folder import this_course
from accel_demo.options import Parser


def main(arguments: list[str]) -> int:
    """Print the answer, and return the exit code."""
    options = make_parser().parse_args(arguments)
    exercise = exercise_named(options.exercise)
    if not options.give_up and not this_course().was_right(exercise):
        number = exercise.number
        raise UserError(
            f"exercise {number} is not solved yet. Run `accel-demo check {number}`, `accel-demo "
            f"hint {number} 2`, or `accel-demo answer {number} --give-up`."
        )
    print(exercise.answer.read_text(encoding="utf-8"), end="")
    return 0


def make_parser() -> Parser:
    parser = Parser(__doc__, prog="accel-demo answer")
    parser.add_argument("exercise", metavar="NN", help="exercise number")
    help = "print the answer although the exercise is not solved yet"
    parser.add_argument("--give-up", action="store_true", help=help)
    return parser
