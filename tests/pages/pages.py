"""What the tests of the pages share: the rows of a page's tables, and the check of an exercise."""

import importlib.util
from pathlib import Path

from accel_demo.lab import grading
from tests.conftest import REPOSITORY

TUTORIALS = REPOSITORY / "tutorials"
EXERCISES = TUTORIALS / "exercises"


def table_rows(page: str, cells: int | None = None) -> list[list[str]]:
    """The cells of the page's tables, without their headings; only rows with so many `cells`."""
    lines = (TUTORIALS / page).read_text().splitlines()
    rows = [line[1:-1].split("|") for line in lines if line.startswith("|")]
    body = [index + 1 for index, row in enumerate(rows) if set("".join(row)) <= set("-: ")]
    headings = {index - offset for index in body for offset in (1, 2)}
    return [
        [cell.strip() for cell in row]
        for index, row in enumerate(rows)
        if index not in headings and len(row) == (cells or len(row))
    ]


def check(start, number: str, file=None, **options):
    """`accel-demo check NUMBER`, of this file or of the one to fill in."""
    return start(["accel-demo", "check", number, *(["--file", file] if file else [])], **options)


def load_grader(number: str):
    """Return the grader of an exercise as a module."""
    spec = importlib.util.spec_from_file_location("grader", EXERCISES / "graders" / f"{number}.py")
    grader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(grader)
    return grader


def mistake_in(grader, answer, *device) -> str:
    """Return the mistake that a grader finds in the answer, or "", without starting a process."""
    return grading.fill_in({}, grader.observe, Path(answer), *device)["mistake"]
