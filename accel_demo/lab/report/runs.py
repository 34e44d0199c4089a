"""Read runs from their folders without importing torch, and list missing or damaged files."""

import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from accel_demo.errors import UserError
from accel_demo.lab.run_list import is_run
from accel_demo.typed_json import LARGEST_FLOAT, load_object, typed
from accel_demo.wording import counted, listed

FILES = {  # files of a run, and the consequence for the report if a file is missing or damaged
    "config.json": "the config is unknown",
    "environment.json": "the machine and the library versions are unknown",
    "metrics.jsonl": "there are no curves",
    "summary.json": "the final results come from metrics.jsonl",
    "predictions.json": "the confusion matrix and the mistakes are not shown",
    "characters.json": "the characters with the largest loss are not shown",
}
CURVES = {
    "train_loss": "Train loss",
    "train_accuracy": "Train accuracy",
    "learning_rate": "Learning rate",
    "test_loss": "Test loss",
    "test_accuracy": "Test accuracy",
    "images_per_second": "Images per second",
    "characters_per_second": "Characters per second",  # of a run on text
}
DAMAGED, CUT_OFF = "damaged and skipped", "cut off and skipped"
NO_NAMES = "skipped, because no metric name is known"
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
    train_seconds: float
    processes: int
    device: str
    images_per_second: float | None = None
    characters_per_second: float | None = None  # of a run on text
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
class CharacterLoss:
    """How often a character occurs in the test text, and how well it is predicted on average."""

    character: str
    times: int
    loss: float
    accuracy: float


@dataclass(frozen=True)
class CharacterLosses:
    """The contents of characters.json: the largest part of the whole loss comes first."""

    characters: list[CharacterLoss]


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
    predictions: Predictions | None  # of a run on images
    characters: list[CharacterLoss] | None  # of a run on text
    is_text: bool
    images_per_step: int | None  # or sequences; of all processes; None if unknown
    problems: list[FileProblem]

    def lines_text(self) -> str:
        """Describe how many lines of metrics.jsonl the report draws, and how many it skips."""
        lines, drawn = self.metrics.lines, self.metrics.lines_drawn
        return f"{drawn:,} of {lines:,} lines of metrics.jsonl drawn, {lines - drawn:,} skipped"


def runs_among(paths: list[Path]) -> list[Path]:
    """Return the paths that are folders of runs.

    Raises `UserError` if a path does not exist, if a run is given twice, or if there is no run.
    """
    runs: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} does not exist. Pass the folder of a run.")
        if path.resolve() in [other.resolve() for other in runs]:
            raise UserError(f"{path} is given twice. Pass each run only once.")
        if is_run(path):
            runs.append(path)
    if not runs and len(paths) > 1:
        raise UserError(f"none of the {len(paths)} paths is the folder of a run")
    if not runs and not paths[0].is_dir():
        raise UserError(f"{paths[0]} is not a folder. Pass the folder of a run.")
    if not runs:
        raise UserError(f"{paths[0]} does not contain a run: it has none of {', '.join(FILES)}")
    return runs


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
    config = _read(folder / "config.json", load_object, problems)
    environment = _read(folder / "environment.json", load_object, problems)
    is_text = (config or {}).get("dataset") == "text"
    losses = _read(folder / "characters.json", _characters, problems) if is_text else None
    return SavedRun(
        name=name,
        folder=str(folder),
        is_finished=(folder / "summary.json").is_file(),
        config=config,
        environment=environment,
        images_per_step=_images_per_step(config, environment, problems),
        metrics=metrics,
        summary=_read(folder / "summary.json", _summary, problems),
        predictions=None if is_text else _read(folder / "predictions.json", _predictions, problems),
        characters=losses.characters if losses else None,
        is_text=is_text,
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
    except ValueError as error:
        reason = str(error) if content else "is empty"
    problems.append(FileProblem(path.name, f"{reason}: {consequence}"))
    return None


def _summary(content: bytes) -> RunSummary:
    values = load_object(content)
    speed = "characters_per_second" if "characters_per_second" in values else "images_per_second"
    typed(float, values.get(speed, MISSING), speed)  # a summary has one of the two
    return typed(RunSummary, values, "the summary")


def _characters(content: bytes) -> CharacterLosses:
    return typed(CharacterLosses, load_object(content), "the file")


def _predictions(content: bytes) -> Predictions:
    predictions = typed(Predictions, load_object(content), "the predictions")
    classes, mistakes = len(predictions.classes), predictions.mistakes
    if [len(row) for row in predictions.confusion] != [classes] * classes:
        raise ValueError("the confusion matrix does not match the number of classes")
    if any(max(mistake.label, mistake.predicted) >= classes for mistake in mistakes):
        raise ValueError("a mistake refers to an unknown class")
    return predictions


def _images_per_step(
    config: dict[str, Any] | None, environment: dict[str, Any] | None, problems: list[FileProblem]
) -> int | None:
    """Return the images or sequences per optimizer step of all processes, or None if unknown."""
    images = 1
    for file, entries, names in (
        ("config.json", config or {}, ("batch_size", "accumulate")),
        ("environment.json", environment or {}, ("processes",)),
    ):
        reasons = []
        for name in names:
            try:
                images *= typed(int, entries.get(name), name)
            except ValueError as reason:
                images = 0
                reasons += [str(reason)] if name in entries else []
        if reasons:
            message = f"{', and '.join(reasons)}: the images per step are unknown"
            problems.append(FileProblem(file, message))
    return images or None


def _metrics(content: bytes) -> tuple[RunMetrics, list[str]]:
    """Return the curves, and remarks about skipped lines and unusual values.

    The last line of a killed run may be incomplete. A run that diverges writes NaN or infinity. If
    a run is resumed with more processes, an epoch has fewer steps, so step numbers may decrease.
    """
    lines = content.splitlines()
    if not lines:
        raise ValueError("is empty")
    curves, remarks, last_step, lines_drawn = RunMetrics().curves, [], 0, 0
    problems: defaultdict[str, list[int]] = defaultdict(list)  # {problem: line numbers}
    unknown: dict[str, None] = {}  # names in lines without a known name, in their order
    for number, line in enumerate(lines, start=1):
        try:
            values = load_object(line)
        except ValueError:
            problems[DAMAGED].append(number)
            continue
        try:
            step = typed(int, values.get("step", MISSING), "step")
        except ValueError as reason:
            problems[f"skipped, because {reason}"].append(number)
            continue
        names = CURVES.keys() & values.keys()
        if not names:
            problems[NO_NAMES].append(number)
            unknown |= dict.fromkeys(values)
            continue
        lines_drawn += 1
        for name in sorted(names):
            try:
                value = typed(float, values[name], name)
            except ValueError as reason:
                problems[f"{reason} and not drawn"].append(number)
                continue
            if abs(value) <= LARGEST_FLOAT:
                curves[name].append((step, value))
            else:
                problems[f"{name} is NaN or infinite and not drawn"].append(number)
        if step < last_step:
            remarks.append(f"the steps go back from {last_step} to {step} at line {number}")
        last_step = step
    if unknown and not lines_drawn:
        del problems[NO_NAMES], unknown["step"]
        remarks.append(f"no known metric names; found: {listed(list(unknown)) or 'only step'}")
    if problems[DAMAGED] == [len(lines)] and not content.endswith(b"\n"):
        problems[CUT_OFF] = problems.pop(DAMAGED)
    remarks += [f"{problem}: {_lines(where)}" for problem, where in problems.items() if where]
    return RunMetrics(len(lines), lines_drawn, curves), remarks


def _lines(numbers: list[int]) -> str:
    """Return text such as "line 7" or "12 lines, from line 3 to line 20"."""
    first, last = numbers[0], numbers[-1]
    many = f"{counted(len(numbers), 'line')}, from line {first} to line {last}"
    return f"line {first}" if first == last else many
