"""The exercises of the course: their files, their hints, and the results of their last checks."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from accel_demo.errors import UserError
from accel_demo.processes.launch import REPOSITORY

TUTORIALS = REPOSITORY / "tutorials"
EXERCISES = TUTORIALS / "exercises"
CHECKED = EXERCISES / ".checked"  # one JSON file per exercise, with the result of the last check


@dataclass(frozen=True)
class Exercise:
    """An exercise of a page. `number` is the number of the page."""

    number: str

    @cached_property
    def file(self) -> Path:
        """The file that the learner edits."""
        return _one_file(EXERCISES, f"{self.number}_*.py")

    @cached_property
    def answer(self) -> Path:
        return _one_file(EXERCISES / "answers", f"{self.number}_*.py")

    @cached_property
    def grader(self) -> Path:
        return _one_file(EXERCISES / "graders", f"{self.number}.py")

    @cached_property
    def page(self) -> Path:
        return _one_file(TUTORIALS, f"{self.number}_*.md")

    @cached_property
    def title(self) -> str:
        return self._entry["title"]

    @cached_property
    def hints(self) -> list[str]:
        return [" ".join(hint.split()) for hint in self._entry["hints"]]

    @cached_property
    def heading(self) -> str:
        """Heading of the page's section that explains what the exercise needs."""
        return self._entry["read"]

    @cached_property
    def _entry(self) -> dict:
        import yaml

        return yaml.safe_load((EXERCISES / "hints.yaml").read_text())[self.number]

    def state(self) -> str:
        """Return the result of the last check of the exercise file, in words."""
        try:
            last = json.loads((CHECKED / f"{self.number}.json").read_text())
        except FileNotFoundError:
            return "not checked yet"
        result = "right" if last["is_right"] else "wrong"
        return result if last["digest"] == _digest(self.file) else f"{result}, but changed since"

    def record(self, is_right: bool, digest: str) -> None:
        """Store the result of a check of the exercise file, which had this digest."""
        CHECKED.mkdir(exist_ok=True)
        unfinished = CHECKED / f"{self.number}.unfinished"
        unfinished.write_text(json.dumps({"is_right": is_right, "digest": digest}) + "\n")
        unfinished.replace(CHECKED / f"{self.number}.json")

    def digest(self) -> str:
        """Return the SHA-256 hash of the exercise file."""
        return _digest(self.file)


def all_exercises() -> dict[str, Exercise]:
    """Return {number: exercise}, in the order of the pages."""
    numbers = sorted(path.stem for path in (EXERCISES / "graders").glob("[0-9]*.py"))
    if not numbers:
        raise UserError(
            "the exercises are not in the installed package. Clone the repository, and run "
            "`pip install -e .` there."
        )
    return {number: Exercise(number) for number in numbers}


def _one_file(folder: Path, pattern: str) -> Path:
    files = sorted(folder.glob(pattern))
    if not files:
        raise UserError(f"{folder / pattern} is missing. Restore it with `git checkout`.")
    if len(files) > 1:
        names = " and ".join(file.name for file in files)
        raise UserError(f"{folder} has {names}. Rename one, so that only the exercise is left.")
    return files[0]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
