"""Write the course to a folder: pages, programs, exercises, train files and launch configs.

accel-demo init                 # to the new folder course/
accel-demo init my_course
accel-demo init .               # in a course: update the files that you have not edited

Run all commands of the course in that folder. `accel-demo next` says where to begin.
"""

from pathlib import Path

from accel_demo.errors import UserError
from accel_demo.lab.course.folder import STATE, Course, find_course
from accel_demo.options import Parser
from accel_demo.terminal import display
from accel_demo.wording import counted


def main(arguments: list[str]) -> int:
    """Write or update a course, and return the exit code."""
    folder: Path | None = make_parser().parse_args(arguments).folder
    course = find_course() if folder is None else None
    if course:
        raise UserError(f"{course.folder} is a course. Run `accel-demo init .` there to update it.")
    folder = folder or Path("course")
    try:
        is_course = (folder / STATE).is_dir()
        if folder.exists() and not is_course and any(folder.iterdir()):
            raise UserError(f"{folder} is not empty. Choose a new folder: accel-demo init DIR")
        folder.mkdir(parents=True, exist_ok=True)
        count, edited = Course(folder).update()
    except OSError as error:
        raise UserError(f"cannot write {error.filename or folder} ({error.strerror})") from None
    if not is_course:
        display(f"wrote {counted(count, 'file')} to {folder}/. Next:\n\n    cd {folder}")
        display("    accel-demo next")
        return 0
    display(f"updated {counted(count, 'file')}")
    if edited:
        display("not updated, because you have edited them and they have changed in the package:")
        display("\n".join(f"    {name}" for name in edited))
    return 0


def make_parser() -> Parser:
    parser = Parser(__doc__, prog="accel-demo init")
    help = "a new or empty folder, or a course (default: course)"
    parser.add_argument("folder", nargs="?", type=Path, metavar="DIR", help=help)
    return parser
