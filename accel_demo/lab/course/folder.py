"""The folder of a learner's course: its files, and the results of the exercises."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from accel_demo.errors import UserError
from accel_demo.files import write_whole
from accel_demo.lab.course.exercises import Exercise
from accel_demo.lab.course.originals import course_files
from accel_demo.typed_json import load_object

STATE = ".accel-demo"  # in the course's folder: which files init wrote, and the results
WRITTEN = "written.json"  # {path: digest} of the files that init wrote
NO_COURSE = (
    "there is no course in this folder. Run `accel-demo init` to write one to course/, then "
    "`cd course`."
)


@dataclass(frozen=True)
class Course:
    """A folder that `accel-demo init` wrote.

    All methods raise `UserError` if a file cannot be read or written.
    """

    folder: Path

    def exercise_file(self, exercise: Exercise) -> Path:
        """Return the file of an exercise that the learner edits. It may be missing."""
        return self.folder / "tutorials" / "exercises" / exercise.original.name

    def state(self, exercise: Exercise) -> str:
        """Return the result of the last check of an exercise, in words."""
        result, file = self._results(exercise), self.exercise_file(exercise)
        with _errors_of(file):
            if not file.exists():
                return "missing"
            if not exercise.is_started(file):
                return "skipped" if result.get("is_skipped") else "not started"
            if "is_right" not in result:
                return "not checked yet"
            words = "right" if result["is_right"] else "wrong"
            return words if result.get("digest") == digest_of(file) else f"{words}, changed since"

    def is_done(self, exercise: Exercise) -> bool:
        """Return True if the exercise was solved once, or skipped."""
        return self.was_right(exercise) or self._results(exercise).get("is_skipped", False)

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

    def reset(self, exercise: Exercise) -> Path | None:
        """Restore the file of an exercise. Return the new name of the edited file, if any."""
        file, kept = self.exercise_file(exercise), None
        with _errors_of(file):
            if file.exists():
                numbers = [path.suffix[1:] for path in file.parent.glob(f"{file.name}.*")]
                last = max([int(number) for number in numbers if number.isdigit()], default=0)
                kept = file.rename(file.with_name(f"{file.name}.{last + 1}"))
            write_whole(file, exercise.original.read_bytes())
        return kept

    def update(self) -> tuple[int, list[str]]:
        """Write all files of the course that are missing, or that the learner has not edited.

        Files that a previous version has written, and that the course no longer has, are deleted if
        they were not edited. Return the number of changed files, and the names of those that were
        left as they are, because they were edited and their originals have changed.
        """
        with _errors_of(self.folder):
            (self.folder / STATE).mkdir(parents=True, exist_ok=True)
        written, files = self._read(WRITTEN), course_files()
        self._write(WRITTEN, written)  # an interrupted init can be repeated
        changed, edited = 0, []
        for name in sorted(files.keys() | written.keys()):
            path, original = self.folder / name, files.get(name)
            original_digest = digest_of_bytes(original) if original is not None else None
            with _errors_of(path):
                current_digest = digest_of(path) if path.exists() else None
                if current_digest not in (None, written.get(name), original_digest):
                    if original_digest != written.get(name):
                        edited.append(name)
                    continue
                if original is None:
                    path.unlink(missing_ok=True)
                    changed += current_digest is not None
                    del written[name]
                    continue
                if current_digest != original_digest:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    write_whole(path, original)
                    changed += 1
            written[name] = original_digest
        self._write(WRITTEN, written)
        return changed, edited

    def _results(self, exercise: Exercise) -> dict:
        return self._read(f"{exercise.number}.json")

    def _update(self, exercise: Exercise, **changes) -> None:
        self._write(f"{exercise.number}.json", self._results(exercise) | changes)

    def _read(self, name: str) -> dict:
        path = self.folder / STATE / name
        try:
            with _errors_of(path):
                return load_object(path.read_bytes()) if path.exists() else {}
        except ValueError:
            raise UserError(f"{path} is damaged. Delete it.") from None

    def _write(self, name: str, content: dict) -> None:
        path = self.folder / STATE / name
        with _errors_of(path):
            write_whole(path, json.dumps(content, indent=1) + "\n")


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Raise `UserError` if the block cannot read or write a file."""
    try:
        yield
    except OSError as error:
        name = error.filename or path
        raise UserError(f"cannot read or write {name} ({error.strerror})") from None


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
    """Return the SHA-256 hash of a file. Raises `OSError` if it cannot be read."""
    return digest_of_bytes(file.read_bytes())


def digest_of_bytes(content: bytes) -> str:
    """Return a SHA-256 hash. Git or an editor may have changed the ends of lines."""
    return hashlib.sha256(content.replace(b"\r\n", b"\n")).hexdigest()
