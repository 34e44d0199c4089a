"""Shorten a run: few batches per pass over a loader, few passes, or few optimizer steps."""

import functools
import os
import sys

from .events import emit, line_of_script

# Environment variables: 0 or absent means no limit
BATCHES, STEPS = "ACCEL_DEMO_AUDIT_BATCHES", "ACCEL_DEMO_AUDIT_STEPS"
EPOCHS = "ACCEL_DEMO_AUDIT_EPOCHS"  # of a loader for training; if set, all samples are recorded
ENDLESS = 1_000_000  # batches: such a loader is not read to its end, but for a number of steps
_real_lengths: dict = {}


def pass_is_over(batches: int, length: int | None) -> bool:
    """Return True if a pass over a loader of `length` batches, or None, has had all its batches."""
    most = int(os.environ.get(BATCHES) or 0)
    return 0 < most and batches >= (most if length is None else shortened(length, most))


def shortened(length: int, most: int) -> int:
    """Return the number of batches of a shortened pass: from `most` to 2 * most - 1.

    The remainder of the division by `most` stays, so that accumulation ends as in the real run. An
    endless loader is not shortened: the script may not expect its end, and reads no second pass.
    """
    return length if length < 2 * most or length >= ENDLESS else most + length % most


def end_run_after(steps: int) -> None:
    """Exit with code 0 before the next optimizer step if this process has made all its steps."""
    most = int(os.environ.get(STEPS) or 0)
    if 0 < most <= steps:
        emit("enough", steps=steps, line=line_of_script(3))
        sys.exit(0)


def end_run_after_epochs(epochs: int) -> None:
    """Exit with code 0 before a loader for training is read again, if it has had all its passes."""
    if records_all_samples() and epochs >= int(os.environ[EPOCHS]):
        emit("enough", steps=0, line=line_of_script(4))
        sys.exit(0)


def records_all_samples() -> bool:
    return EPOCHS in os.environ


def shorten(loader_class) -> None:
    """Let `len(loader)` be the number of batches of a pass."""
    original = loader_class.__len__
    _real_lengths["len"] = original

    @functools.wraps(original)
    def length(self):
        most = int(os.environ.get(BATCHES) or 0)
        real = original(self)
        return shortened(real, most) if most else real

    loader_class.__len__ = length


def real_length(loader) -> int | None:
    """Return the number of batches that the loader would have, or None if it is unknown."""
    try:
        return _real_lengths["len"](loader)
    except (TypeError, NotImplementedError):
        return None
