"""Read runs from their folders without importing torch, and list missing or damaged files."""

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from accel_demo.errors import UserError
from accel_demo.wording import counted

FILES = {  # files of a run, and the consequence for the report if a file is missing or damaged
    "config.json": "the config is unknown",
    "environment.json": "the machine and the library versions are unknown",
    "metrics.jsonl": "there are no curves",
    "summary.json": "the final results come from metrics.jsonl",
    "predictions.json": "the confusion matrix and the mistakes are not shown",
}
CURVES = {
    "train_loss": "Train loss",
    "train_accuracy": "Train accuracy",
    "learning_rate": "Learning rate",
    "test_loss": "Test loss",
    "test_accuracy": "Test accuracy",
    "images_per_second": "Images per second",
}
Point = tuple[int, float]  # (step, value)
Content = TypeVar("Content")


@dataclass(frozen=True)
class RunMetrics:
    """The curves from metrics.jsonl: a list of points for each name in `CURVES`."""

    lines: int = 0
    lines_drawn: int = 0
    curves: dict[str, list[Point]] = field(default_factory=lambda: {name: [] for name in CURVES})

    @property
    def last_step(self) -> int:
        """The highest step in any curve, or 0 if all curves are empty."""
        return max((step for points in self.curves.values() for step, _ in points), default=0)

    def values(self, name: str) -> list[float]:
        """Return the values of a curve, without the steps."""
        return [value for _, value in self.curves[name]]


@dataclass(frozen=True)
class RunSummary:
    """The final results of a finished run, from summary.json."""

    test_accuracy: float
    best_test_accuracy: float
    images_per_second: float
    train_seconds: float
    processes: int
    device: str
    peak_gpu_memory_bytes: int | None = None


@dataclass(frozen=True)
class Mistake:
    """A misclassified test image. `png` is the image as a PNG file, encoded in base64."""

    index: int
    label: int
    predicted: int
    probability: float
    png: str


@dataclass(frozen=True)
class ClassConfusion:
    """The number of images of class `true` that were misclassified as `predicted`."""

    true: str
    predicted: str
    images: int
    images_of_class: int


@dataclass(frozen=True)
class Predictions:
    """A run's confusion matrix (one row per true class) and most confident mistakes."""

    classes: list[str]
    confusion: list[list[int]]
    mistakes: list[Mistake]

    def accuracy_text(self) -> str:
        """Return a text such as "40 of 64 test images correct"."""
        right = sum(row[label] for label, row in enumerate(self.confusion))
        return f"{right:,} of {sum(map(sum, self.confusion)):,} test images correct"

    def confusions(self) -> list[ClassConfusion]:
        """Return all pairs of classes that were confused, sorted from most to least frequent."""
        pairs = [
            ClassConfusion(self.classes[label], self.classes[predicted], images, sum(row))
            for label, row in enumerate(self.confusion)
            for predicted, images in enumerate(row)
            if images and label != predicted
        ]
        return sorted(pairs, key=lambda pair: -pair.images)


@dataclass(frozen=True)
class FileProblem:
    """A problem with a file of a run: for example, the file is missing or has damaged lines."""

    file: str
    message: str


@dataclass(frozen=True)
class SavedRun:
    """The data from a run's files. An optional field is None if its file is missing or damaged."""

    name: str
    folder: str
    is_finished: bool
    config: dict[str, Any] | None
    environment: dict[str, Any] | None
    metrics: RunMetrics
    summary: RunSummary | None
    predictions: Predictions | None
    problems: list[FileProblem]

    @property
    def images_per_step(self) -> int | None:
        """Images per optimizer step, summed over all processes, or None if unknown."""
        config, environment = self.config or {}, self.environment or {}
        factors: list[Any] = [config.get("batch_size"), config.get("accumulate")]
        factors.append(environment.get("processes"))
        return math.prod(factors) if all(factors) else None

    def lines_text(self) -> str:
        """Describe how many lines of metrics.jsonl the report draws, and how many it skips."""
        lines, drawn = self.metrics.lines, self.metrics.lines_drawn
        return f"{drawn:,} of {lines:,} lines of metrics.jsonl drawn, {lines - drawn:,} skipped"


def check_folders(folders: list[Path]) -> None:
    """Raise `UserError` if a folder does not contain a run or is given twice."""
    for index, folder in enumerate(folders):
        if not folder.is_dir():
            problem = "is not a folder" if folder.exists() else "does not exist"
            raise UserError(f"{folder} {problem}. Pass the folder of a run.")
        if not any(os.path.exists(folder / file) for file in FILES):
            raise UserError(f"{folder} does not contain a run: it has none of {', '.join(FILES)}")
        if folder.resolve() in [other.resolve() for other in folders[:index]]:
            raise UserError(f"{folder} is given twice. Pass each run only once.")


def read_runs(folders: list[Path]) -> list[SavedRun]:
    """Read each run, and name it after its folder. If two names are equal, use relative paths."""
    paths = [os.path.abspath(folder) for folder in folders]
    names = [os.path.basename(path) or path for path in paths]
    if len(set(names)) < len(names):
        common = os.path.commonpath([os.path.dirname(path) for path in paths])
        names = [os.path.relpath(path, common) for path in paths]
    return [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]


def read_run(folder: Path, name: str) -> SavedRun:
    """Read the run in `folder`, and list missing and damaged files in its `problems`."""
    problems: list[FileProblem] = []
    metrics, remarks = _read(folder / "metrics.jsonl", _metrics, problems) or (RunMetrics(), [])
    problems += [FileProblem("metrics.jsonl", remark) for remark in remarks]
    return SavedRun(
        name=name,
        folder=str(folder),
        is_finished=(folder / "summary.json").is_file(),
        config=_read(folder / "config.json", _object, problems),
        environment=_read(folder / "environment.json", _object, problems),
        metrics=metrics,
        summary=_read(folder / "summary.json", _summary, problems),
        predictions=_read(folder / "predictions.json", _predictions, problems),
        problems=problems,
    )


def _read(
    path: Path, parse: Callable[[bytes], Content], problems: list[FileProblem]
) -> Content | None:
    """Read and parse a file. If this fails, append the reason to `problems` and return None."""
    content, consequence = b"", FILES[path.name]
    try:
        content = path.read_bytes()
        return parse(content)
    except FileNotFoundError:
        reason = "is missing"
        if path.name == "summary.json":
            consequence = "the run has not finished"
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
    except (ValueError, LookupError, TypeError, OverflowError):  # truncated or corrupt file
        reason = "is damaged" if content else "is empty"
    problems.append(FileProblem(path.name, f"{reason}: {consequence}"))
    return None


def _object(content: bytes) -> dict[str, Any]:
    value = json.loads(content.decode())
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _summary(content: bytes) -> RunSummary:
    summary = RunSummary(**_object(content))
    types = {"device": str, "peak_gpu_memory_bytes": int | None}
    for name, value in vars(summary).items():
        if not isinstance(value, types.get(name, int | float)):
            raise TypeError(f"{name} is {value!r}")
    return summary


def _predictions(content: bytes) -> Predictions:
    values = _object(content)
    classes, confusion = values["classes"], values["confusion"]
    mistakes = [Mistake(**mistake) for mistake in values["mistakes"]]
    if [len(row) for row in confusion] != [len(classes)] * len(classes):
        raise ValueError("the confusion matrix does not match the number of classes")
    if not {m.label for m in mistakes} | {m.predicted for m in mistakes} <= set(
        range(len(classes))
    ):
        raise ValueError("a mistake refers to an unknown class")
    return Predictions(classes, confusion, mistakes)


def _metrics(content: bytes) -> tuple[RunMetrics, list[str]]:
    """Return the curves, and remarks about skipped lines and unusual values.

    The last line of a killed run may be incomplete. A run that diverges writes NaN or infinity. If
    a run is resumed with more processes, an epoch has fewer steps, so step numbers may decrease.
    """
    lines = content.splitlines()
    if not lines:
        raise ValueError("metrics.jsonl is empty")
    curves, remarks, last_step = RunMetrics().curves, [], 0
    skipped: list[int] = []  # line numbers
    not_finite: dict[str, list[int]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            values = _object(line)
            step = int(values["step"])
            measured = {name: float(values[name]) for name in CURVES if name in values}
        except (ValueError, LookupError, TypeError, OverflowError):
            skipped.append(number)
            continue
        for name, value in measured.items():
            if math.isfinite(value):
                curves[name].append((step, value))
            else:
                not_finite.setdefault(name, []).append(number)
        if step < last_step:
            remarks.append(f"the steps go back from {last_step} to {step} at line {number}")
        last_step = step
    for name, numbers in not_finite.items():
        remarks.append(f"{name} is NaN or infinite and not drawn: {_lines(numbers)}")
    if skipped == [len(lines)] and not content.endswith(b"\n"):
        remarks.append(f"cut off and skipped: line {len(lines)}")
    elif skipped:
        remarks.append(f"damaged and skipped: {_lines(skipped)}")
    return RunMetrics(len(lines), len(lines) - len(skipped), curves), remarks


def _lines(numbers: list[int]) -> str:
    """Return text such as "line 7" or "12 lines, from line 3 to line 20"."""
    first, last = numbers[0], numbers[-1]
    many = f"{counted(len(numbers), 'line')}, from line {first} to line {last}"
    return f"line {first}" if first == last else many
