"""The folder of a learner's course: its files, and the results of the exercises."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from accel_demo.errors import UserError
from accel_demo.files import write_whole
from accel_demo.lab.course.exercises import Exercise, one_file
from accel_demo.lab.course.originals import course_files

STATE = ".accel-demo"  # in the course's folder: which files init wrote, and the results
WRITTEN = "written.json"  # {path: digest} of the files that init wrote
NO_COURSE = (
    "there is no course in this folder. Run `accel-demo init` to write one to course/, then "
    "`cd course`."
)


@dataclass(frozen=True)
class Course:
    """A folder that `accel-demo init` wrote."""

    folder: Path

    def exercise_file(self, exercise: Exercise) -> Path:
        """Return the file of an exercise that the learner edits."""
        return one_file(self.folder / "tutorials" / "exercises", f"{exercise.number}_*.py")

    def state(self, exercise: Exercise) -> str:
        """Return the result of the last check of an exercise, in words."""
        result = self._results(exercise)
        file = self.exercise_file(exercise)
        if "is_right" in result:
            words = "right" if result["is_right"] else "wrong"
            return words if result["digest"] == digest_of(file) else f"{words}, but changed since"
        return "not checked yet" if exercise.is_started(file) else "not started"

    def is_done(self, exercise: Exercise) -> bool:
        """Return True if the exercise was solved once, or skipped."""
        result = self._results(exercise)
        return result.get("was_right", False) or result.get("is_skipped", False)

    def was_right(self, exercise: Exercise) -> bool:
        """Return True if a check has found the exercise right, even if it was changed later."""
        return self._results(exercise).get("was_right", False)

    def record(self, exercise: Exercise, is_right: bool, digest: str) -> None:
        """Store the result of a check of the exercise file, which had this digest."""
        was_right = is_right or self.was_right(exercise)
        self._update(exercise, is_right=is_right, digest=digest, was_right=was_right)

    def skip(self, exercise: Exercise) -> None:
        """Let `accel-demo next` go on without this exercise."""
        self._update(exercise, is_skipped=True)

    def reset(self, exercise: Exercise) -> Path:
        """Restore the file of an exercise. Return the new name of the edited file."""
        file = self.exercise_file(exercise)
        numbers = [path.suffix[1:] for path in file.parent.glob(f"{file.name}.*")]
        last = max([int(number) for number in numbers if number.isdigit()], default=0)
        kept = file.with_name(f"{file.name}.{last + 1}")
        file.rename(kept)
        write_whole(file, exercise.original.read_bytes())
        return kept

    def update(self) -> tuple[int, list[str]]:
        """Write all files of the course that are missing, or that the learner has not edited.

        Return the number of files that were written, and the names of those that were not, because
        they were edited and their originals are different.
        """
        written = self._read(WRITTEN)
        self._write(WRITTEN, written)  # an interrupted init can be repeated
        count, edited = 0, []
        for name, content in course_files().items():
            path, before, new = self.folder / name, written.get(name), digest_of_bytes(content)
            now = digest_of(path) if path.exists() else None
            if now not in (None, before, new):
                if before != new:
                    edited.append(name)
                continue
            if now != new:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, content)
                count += 1
            written[name] = new
        self._write(WRITTEN, written)
        return count, edited

    def _results(self, exercise: Exercise) -> dict:
        return self._read(f"{exercise.number}.json")

    def _update(self, exercise: Exercise, **changes) -> None:
        self._write(f"{exercise.number}.json", self._results(exercise) | changes)

    def _read(self, name: str) -> dict:
        try:
            return json.loads((self.folder / STATE / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError:
            raise UserError(f"{self.folder / STATE / name} is damaged: delete it") from None

    def _write(self, name: str, content: dict) -> None:
        (self.folder / STATE).mkdir(exist_ok=True)
        write_whole(self.folder / STATE / name, json.dumps(content, indent=1) + "\n")


def find_course() -> Course | None:
    """Return the course in the current folder or in one above it, or None."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / STATE / WRITTEN).is_file():
            return Course(folder)
    return None


def this_course() -> Course:
    """Return the course in the current folder or above. Raises `UserError` if there is none."""
    course = find_course()
    if course is None and Path("course", STATE).is_dir():
        raise UserError("the course is in course/. Run `cd course` first.")
    if course is None:
        raise UserError(NO_COURSE)
    return course


def digest_of(file: Path) -> str:
    """Return the SHA-256 hash of a file."""
    return digest_of_bytes(file.read_bytes())


def digest_of_bytes(content: bytes) -> str:
    """Return a SHA-256 hash. Git or an editor may have changed the ends of lines."""
    return hashlib.sha256(content.replace(b"\r\n", b"\n")).hexdigest()
