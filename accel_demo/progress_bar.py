"""A progress bar for a terminal. In a log, a plain line now and then."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

from tqdm import tqdm

from accel_demo.errors import say

SECONDS_BETWEEN_LINES = 10.0


class ProgressBar(tqdm):
    """A tqdm bar if stderr is a terminal. Otherwise, print a line at the start, and further lines.

    In a log, each update of a bar would remain. The lines are at least `seconds_between_lines`
    seconds apart. `is_shown` is for programs with several ranks, of which only one shows the bar or
    prints the lines.
    """

    def __init__(
        self,
        description: str,
        unit: str,
        steps: Iterable | None = None,
        *,
        total: int | None = None,
        leave: bool = True,
        is_shown: bool = True,
        seconds_between_lines: float = SECONDS_BETWEEN_LINES,
    ):
        # With None, tqdm shows the bar if stderr is a terminal.
        disable = None if is_shown else True
        super().__init__(steps, description, total, leave=leave, unit=unit, disable=disable)
        self.prints_lines = is_shown and bool(self.disable)
        self.description, self.unit = description, unit
        self.seconds_between_lines = seconds_between_lines
        self.started_at = time.monotonic()
        self.print_line()

    def __iter__(self) -> Iterator[Any]:
        if not self.disable:
            yield from super().__iter__()
            return
        for step in self.iterable:  # a disabled tqdm would not count
            yield step
            self.update()

    def update(self, n: float | None = 1) -> bool | None:
        if not self.disable:
            return super().update(n)
        self.n += n or 0
        if time.monotonic() >= self.printed_at + self.seconds_between_lines:
            self.print_line()

    def print_line(self) -> None:
        """Print how much is done, if this is a log."""
        self.printed_at = time.monotonic()
        if self.prints_lines:
            seconds = self.printed_at - self.started_at
            say(f"{self.description}: {self.unit} {self.n}/{self.total}, {seconds:.0f} s")
