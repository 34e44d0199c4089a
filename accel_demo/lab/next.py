"""Show what to read and which exercise to do now.

accel-demo next
accel-demo next --skip                  # go on without this exercise; you can still do it later

The main path of the course comes first, then the exercises of the other pages. An exercise is done
when `accel-demo check` has found it right.
"""

import yaml

from accel_demo.errors import UserError
from accel_demo.lab.course.exercises import Exercise, all_exercises
from accel_demo.lab.course.folder import Course, this_course
from accel_demo.lab.course.originals import TUTORIALS
from accel_demo.options import Parser
from accel_demo.terminal import display


def main(arguments: list[str]) -> int:
    """Print the next page and exercise, and return the exit code."""
    options = make_parser().parse_args(arguments)
    course = this_course()
    contents = yaml.safe_load((TUTORIALS / "course.yaml").read_text(encoding="utf-8"))
    if options.skip:
        skipped = next_exercise(course, contents["path"])
        if skipped is None:
            raise UserError("there is nothing to skip: you have done all exercises")
        course.skip(skipped)
    exercise = next_exercise(course, contents["path"])
    path = [all_exercises()[str(number)] for number in contents["path"]]
    done = sum(course.is_done(each) for each in path)
    display(f"main path: {done} of {len(path)} exercises done or skipped")
    if exercise is None:
        display("There is nothing left to do. `accel-demo check` lists all exercises.")
        return 0
    if exercise not in path:
        display("That was the main path. Read the other pages when you need them.")
    [(name, title, question)] = [
        page for page in contents["pages"] if page[0].startswith(exercise.number)
    ]
    file = course.exercise_file(exercise).relative_to(course.folder)
    number = exercise.number
    display(f"\n{number} {title}\n{question}\n")
    display(f"  read  tutorials/{name}.md")
    display(f"  edit  {file} ({course.state(exercise)})")
    display(f"  task  {exercise.title}")
    display(f"\nThen run `accel-demo check {number}`. For a hint: `accel-demo hint {number}`")
    return 0


def make_parser() -> Parser:
    parser = Parser(__doc__, prog="accel-demo next")
    parser.add_argument("--skip", action="store_true", help="go on without this exercise")
    return parser


def next_exercise(course: Course, path: list[int]) -> Exercise | None:
    """Return the first exercise that is not done: those of the main path first."""
    exercises = all_exercises()
    first = [str(number) for number in path]
    for number in [*first, *(number for number in exercises if number not in first)]:
        if not course.is_done(exercises[number]):
            return exercises[number]
    return None
