"""The exercises of the course: their files, hints, answers and graders."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from accel_demo.errors import UserError
from accel_demo.lab.course.originals import EXERCISES, TUTORIALS

SUFFIXES = (".py", ".sbatch")  # of exercise files


@dataclass(frozen=True)
class Exercise:
    """An exercise of a page. `number` is the number of the page."""

    number: str

    @cached_property
    def original(self) -> Path:
        """The exercise file as we wrote it: a Python file, or a batch script for Slurm."""
        return _one_file(EXERCISES, *(f"{self.number}_*{suffix}" for suffix in SUFFIXES))

    @cached_property
    def answer(self) -> Path:
        return _one_file(EXERCISES / "answers", f"{self.number}_*{self.original.suffix}")

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

        return yaml.safe_load((EXERCISES / "hints.yaml").read_text(encoding="utf-8"))[self.number]

    def is_started(self, answer: Path) -> bool:
        """Return False if the answer is the exercise file as we wrote it."""
        texts = [file.read_bytes().replace(b"\r\n", b"\n") for file in (answer, self.original)]
        return texts[0] != texts[1]


def all_exercises() -> dict[str, Exercise]:
    """Return {number: exercise}, in the order of the pages."""
    numbers = sorted(path.stem for path in (EXERCISES / "graders").glob("[0-9]*.py"))
    return {number: Exercise(number) for number in numbers}


def exercise_named(number: str) -> Exercise:
    """Return an exercise. Raises `UserError` if there is none with this number."""
    exercises = all_exercises()
    if number not in exercises:
        raise UserError(f"there is no exercise {number}. Choose one of {', '.join(exercises)}.")
    return exercises[number]


def _one_file(folder: Path, *patterns: str) -> Path:
    files = sorted(file for pattern in patterns for file in folder.glob(pattern))
    if len(files) != 1:
        found = " and ".join(file.name for file in files) or "no such file"
        expected = folder / patterns[0]
        raise UserError(f"expected one file {expected}, got {found}. Reinstall accel-demo.")
    return files[0]
