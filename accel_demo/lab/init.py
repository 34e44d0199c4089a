"""Write the course to a folder: pages, programs, exercises, train files and launch configs.

accel-demo init                 # to the new folder course/
accel-demo init my_course

In a course, or with the folder of a course, this command updates the files that you have not
edited. Run all commands of the course in its folder. `accel-demo next` says where to begin.
"""

import shlex
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
    folder = course.folder if course else folder or Path("course")
    is_course = (folder / STATE).is_dir()
    try:
        if not is_course and folder.exists() and any(folder.iterdir()):
            raise UserError(f"{folder} is not empty. Choose a new folder.")
    except OSError as error:
        raise UserError(f"{folder} cannot be used ({error.strerror})") from None
    changed, edited = Course(folder).update()
    if is_course:
        display(f"updated {counted(changed, 'file')} of the course in {folder.resolve()}")
    else:
        display(f"wrote {counted(changed, 'file')} to {folder}. Next:\n")
        if folder.resolve() != Path.cwd():
            display(f"    cd {shlex.quote(str(folder))}")
        display("    accel-demo next")
    if edited:
        display("left as you have edited them, although the package has new versions:")
        display("\n".join(f"    {name}" for name in edited))
        display("To get a new version, rename your file and run this command again.")
    return 0


def make_parser() -> Parser:
    parser = Parser(__doc__, prog="accel-demo init")
    help = "a new or empty folder, or a course (default: course)"
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help=help)
    return parser
