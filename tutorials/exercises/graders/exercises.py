"""The exercises of the course, and what `accel-demo check` does with them.

accel_demo/lab/check.py has the options of the command.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from accel_demo.errors import UserError, output_may_be_closed
from accel_demo.files import write_whole
from accel_demo.processes.cleanup import kill_tree, sigterm_raises
from accel_demo.processes.launch import REPOSITORY, start
from accel_demo.show import table
from accel_demo.wording import counted

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
            return "not checked yet" if self.is_started(self.file) else "not written yet"
        result = "right" if last["is_right"] else "wrong"
        return result if last["digest"] == self.digest() else f"{result}, but changed since"

    def record(self, is_right: bool, digest: str) -> None:
        """Store the result of a check of the exercise file, which had this digest."""
        CHECKED.mkdir(exist_ok=True)
        result = json.dumps({"is_right": is_right, "digest": digest})
        write_whole(CHECKED / f"{self.number}.json", f"{result}\n")

    def digest(self) -> str:
        """Return the SHA-256 hash of the exercise file."""
        return digest_of(self.file)

    def is_started(self, answer: Path) -> bool:
        """Return False if the answer is the exercise file as we wrote it."""
        return digest_of(answer) != self._entry["digest"]


def run(options: argparse.Namespace) -> int:
    """Do what the options say. Return one of the exit codes in accel_demo/lab/check.py."""
    exercises = all_exercises()
    if options.exercise is None:
        for flag in ("file", "hint", "answer"):
            if getattr(options, flag):
                example = f"accel-demo check 10 --{flag}{' my_answer.py' * (flag == 'file')}"
                raise UserError(f"--{flag} needs an exercise: {example}")
        return check_all(exercises) if options.all else show_list(exercises)
    if options.all:
        raise UserError("--all checks every exercise: leave out the number")
    if options.exercise not in exercises:
        known = ", ".join(exercises)
        raise UserError(f"there is no exercise {options.exercise}. Choose one of {known}.")
    exercise = exercises[options.exercise]
    if options.hint not in (None, 1, 2):
        raise UserError(f"there are two hints: --hint must be 1 or 2, got {options.hint}")
    if options.hint:
        print(f"hint {options.hint} of {len(exercise.hints)}: {exercise.hints[options.hint - 1]}")
        return 0
    if options.answer:
        print(exercise.answer.read_text(), end="")
        return 0
    return check(exercise, options.file)


def show_list(exercises: dict[str, Exercise]) -> int:
    rows = [[number, one.title, one.state()] for number, one in exercises.items()]
    print(table(["NN", "exercise", "state"], rows))
    print("\nThe files are in tutorials/exercises/. Check one with `accel-demo check NN`.")
    return 0


def check_all(exercises: dict[str, Exercise]) -> int:
    right = 0
    for number, exercise in exercises.items():
        print(f"{number} {exercise.title}", flush=True)
        right += check(exercise) == 0
        print(flush=True)
    print(f"{right} of {counted(len(exercises), 'exercise')} are right")
    return 0 if right == len(exercises) else 1


def check(exercise: Exercise, file: Path | None = None) -> int:
    """Run the grader on `file`, or on the exercise file. Return the exit code."""
    answer = file or exercise.file
    if not answer.is_file():
        raise UserError(f"no answer file at {answer}. Specify one with --file.")
    if answer.suffix != ".py":
        raise UserError(f"{answer} must be a Python file with a name that ends in .py")
    if not exercise.is_started(answer):
        with output_may_be_closed():  # the exit code stays the same
            print(
                f"not written yet: {answer.name} is unchanged. Its first lines describe the task."
            )
            print(f"For a hint: accel-demo check {exercise.number} --hint")
        return 5
    digest = exercise.digest()  # the learner may save the file while it is being checked
    command = [sys.executable, str(exercise.grader), str(answer)]
    grader = start(command, dict(os.environ), sys.stdout, sys.stderr, cwd=Path.cwd())
    with sigterm_raises(SystemExit(128 + signal.SIGTERM)):
        try:
            code = grader.wait()
        finally:  # after Ctrl-C or SIGTERM, the grader and the answer may still be running
            kill_tree(grader)
    if file is None and code in (0, 1):
        exercise.record(code == 0, digest)
    return code


def digest_of(file: Path) -> str:
    """Return the SHA-256 hash of a text file. Git may have changed the ends of its lines."""
    return hashlib.sha256(file.read_bytes().replace(b"\r\n", b"\n")).hexdigest()


def all_exercises() -> dict[str, Exercise]:
    """Return {number: exercise}, in the order of the pages."""
    numbers = sorted(path.stem for path in (EXERCISES / "graders").glob("[0-9]*.py"))
    return {number: Exercise(number) for number in numbers}


def _one_file(folder: Path, pattern: str) -> Path:
    files = sorted(folder.glob(pattern))
    if not files:
        raise UserError(f"{folder / pattern} is missing. Restore it with `git checkout`.")
    if len(files) > 1:
        names = " and ".join(file.name for file in files)
        raise UserError(f"{folder} has {names}. Rename one, so that only the exercise is left.")
    return files[0]
