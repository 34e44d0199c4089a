"""The lines of a run's metrics.jsonl: the curves in them, and each line that cannot be drawn."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from accel_demo.lab.report.files import (
    LARGEST,
    Unreadable,
    is_count,
    is_number,
    kind_of,
    open_file,
    parse,
)

LONGEST_LINE = 64 * 1024  # bytes; the lines of a run have about 170
MOST_LINES, MOST_BYTES = 200_000, 64 * 1024**2  # read of one file
MOST_NOTES = 1000  # of lines skipped, and of lines drawn in part
MOST_PIECES = 100  # of one curve
# What a line of the training holds, and one of an evaluation, with the largest value it can have.
TRAINING = {
    "train_loss": LARGEST,
    "train_accuracy": 1,
    "learning_rate": LARGEST,
    "images_per_second": LARGEST,
}
EVALUATION = {"test_loss": LARGEST, "test_accuracy": 1}
CURVES = {
    "train_loss": "Train loss",
    "train_accuracy": "Train accuracy",
    "learning_rate": "Learning rate",
    "test_loss": "Test loss",
    "test_accuracy": "Test accuracy",
    "images_per_second": "Images per second",
}


def read_metrics(path: Path) -> dict:
    """Every line of the file, by what became of it. Raises `Unreadable` where there is no file.

    `lines` counts them, and `drawn` those of which something can be drawn. `curves` has for each
    name of `CURVES` its pieces, lists of [step, value]: where the steps go back, as after a resume,
    a new piece begins. `skipped` lists the lines of which nothing is drawn, `remarks` those drawn
    in part or out of order, both as {"first", "last", "says"}: equal neighbours are one entry, and
    so is all that comes after `MOST_NOTES` of them. Of a file beyond `MOST_LINES` or `MOST_BYTES`
    the first line that is not read is skipped, and counted; those after it are not.
    """
    curves = {name: [] for name in CURVES}
    found = {"lines": 0, "drawn": 0, "curves": curves, "skipped": [], "remarks": []}
    with open_file(path) as file:
        for number, (line, is_ended) in enumerate(_lines(file), start=1):
            found["lines"] = number
            if number > MOST_LINES or file.tell() > MOST_BYTES:
                much = f"{MOST_LINES:,} lines or {MOST_BYTES // 1024**2} MiB"
                _note(found["skipped"], number, f"and the rest are not read: more than {much}")
                break
            try:
                remark = _draw(_values(line, is_ended), curves)
                found["drawn"] += 1
            except Unreadable as reason:
                _note(found["skipped"], number, str(reason))
            else:
                if remark:
                    _note(found["remarks"], number, remark)
    return found


def last_step(metrics: dict) -> int:
    """The highest step that a line has reached; 0 where there is none."""
    return max((point[0] for _, point in all_points(metrics)), default=0)


def all_points(metrics: dict) -> Iterator[tuple[str, list]]:
    """Every (name of a curve, [step, value])."""
    for name, pieces in metrics["curves"].items():
        for piece in pieces:
            for point in piece:
                yield name, point


def _lines(file: BinaryIO) -> Iterator[tuple[bytes | None, bool]]:
    """Each line, None for one that is too long; and whether a line feed ends it."""
    try:
        while line := file.readline(LONGEST_LINE + 1):
            is_long = len(line) > LONGEST_LINE
            while not line.endswith(b"\n") and file.tell() <= MOST_BYTES:
                if not (rest := file.readline(LONGEST_LINE)):
                    break
                line = rest
            yield None if is_long else line, line.endswith(b"\n")
    except OSError as error:
        raise Unreadable(f"cannot be read ({error.strerror})") from None


def _values(line: bytes | None, is_ended: bool) -> dict:
    if line is None:
        raise Unreadable(f"is longer than {LONGEST_LINE // 1024} KiB")
    try:
        return parse(line)
    except Unreadable as reason:
        if not is_ended and str(reason) in ("is not JSON", "is not UTF-8"):
            raise Unreadable("is cut off: the file ends in the middle of it") from None
        raise


def _draw(values: dict, curves: dict[str, list]) -> str:
    """Add one line to the curves; what is to be said of it. Raises `Unreadable`: nothing added."""
    if "step" not in values:
        raise Unreadable("has no step")
    step = values["step"]
    if not is_count(step):
        raise Unreadable(f"has the step {kind_of(step)}, not a whole number of at least 0")
    wanted = {}
    for group in (TRAINING, EVALUATION):
        if not group.keys().isdisjoint(values):
            wanted |= group
    if not wanted:
        raise Unreadable("has a step, but nothing to draw")
    drawn, remarks, before = {}, [], -1
    for name, most in wanted.items():
        if name not in values:
            remarks.append(f"has no {name}")
        elif is_number(values[name], 0, most):
            drawn[name] = values[name]
            if curves[name]:
                before = max(before, curves[name][-1][-1][0])
        else:
            limit = " from 0 to 1" if most == 1 else " of at least 0"
            remarks.append(f"has the {name} {kind_of(values[name])}, not a number{limit}")
    if not drawn:
        raise Unreadable("; ".join(remarks))
    if step <= before and max(len(curves[name]) for name in drawn) >= MOST_PIECES:
        raise Unreadable(f"has step {step} after step {before}, after {MOST_PIECES} pieces")
    for name, value in drawn.items():
        pieces = curves[name]
        if not pieces or step <= pieces[-1][-1][0]:
            pieces.append([])
        pieces[-1].append([step, value])
    if remarks:
        remarks.append("the rest is drawn")
    if step <= before:
        remarks.append(f"has step {step} after step {before}: its curves begin a new piece")
    return "; ".join(remarks)


def _note(notes: list[dict], number: int, says: str) -> None:
    if notes and notes[-1]["says"] == says and notes[-1]["last"] == number - 1:
        notes[-1]["last"] = number
    elif len(notes) < MOST_NOTES:
        notes.append({"first": number, "last": number, "says": says})
    else:
        many = "is one of many such lines from here on, too many to name each"
        notes[-1] |= {"last": number, "says": many}
