"""Restore the file of an exercise, and keep yours under another name.

accel-demo reset 10
"""

from accel_demo.lab.course.exercises import exercise_named
from accel_demo.lab.course.folder import this_course
from accel_demo.options import Parser
from accel_demo.terminal import display


def main(arguments: list[str]) -> int:
    """Restore the exercise file, and return the exit code."""
    exercise = exercise_named(make_parser().parse_args(arguments).exercise)
    course = this_course()
    file = course.exercise_file(exercise)
    if file.exists() and not exercise.is_started(file):
        display(f"{file.name} is already the original")
        return 0
    kept = course.reset(exercise)
    display(f"restored {file.name}{f'; your version is now {kept.name}' if kept else ''}")
    return 0


def make_parser() -> Parser:
    parser = Parser(__doc__, prog="accel-demo reset")
    parser.add_argument("exercise", metavar="NN", help="exercise number")
    return parser
