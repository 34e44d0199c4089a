"""Helpers for the page tests: they read a page, compare versions, and grade exercises."""

import importlib.util
import re
from importlib import metadata
from pathlib import Path

import grading
import pytest
from packaging.version import Version

from tests.conftest import REPOSITORY

TUTORIALS = REPOSITORY / "tutorials"
EXERCISES = TUTORIALS / "exercises"
FIELD = Path(__file__).parent / "field"  # small scripts with mistakes that readers have asked about


def table_rows(page: str, cells: int | None = None) -> list[list[str]]:
    """Return the rows of the page's tables, without headings.

    If `cells` is given, return only the rows that have this number of cells.
    """
    lines = (TUTORIALS / page).read_text().splitlines()
    rows = [line[1:-1].split("|") for line in lines if line.startswith("|")]
    body = [index + 1 for index, row in enumerate(rows) if set("".join(row)) <= set("-: ")]
    headings = {index - offset for index in body for offset in (1, 2)}
    return [
        [cell.strip() for cell in row]
        for index, row in enumerate(rows)
        if index not in headings and len(row) == (cells or len(row))
    ]


def rows_below(page: Path, heading: str) -> list[list[str]]:
    """Find the table whose first heading is `heading`, and return the rows below the headings."""
    lines = page.read_text().splitlines()
    [start] = [
        n for n, line in enumerate(lines) if re.match(rf"\| +{re.escape(heading)} +\|", line)
    ]
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return rows
        rows.append([cell.strip() for cell in line[1:-1].split("|")])
    return rows


def headings_of(text: str) -> list[str]:
    """Return the headings of a page below its title, without lines in code that look like one."""
    text = re.sub(r"^(`{3,}).*?^\1\s*$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"^###? (.*)$", text, flags=re.MULTILINE)


def section(text: str, heading: str) -> str:
    """Return the part of a page from a heading to the next one."""
    # In code, a line that begins with # is a comment.
    code = r"^(`{3,}).*?^\1\s*$"
    indented = re.compile(code, re.DOTALL | re.MULTILINE).sub(
        lambda block: block[0].replace("\n#", "\n #"), text
    )
    parts = re.split(r"^#+ (.*)\n", indented, flags=re.MULTILINE)
    return parts[parts.index(heading) + 1]


def output_of(page: str, command: str) -> str:
    """Return the output of a command in a block of the page."""
    block = rf"^```text\n\$ {re.escape(command)}\n(.*?)^```$"
    [output] = re.findall(block, (TUTORIALS / page).read_text(), re.DOTALL | re.MULTILINE)
    return output


def transcript(name: str) -> dict[str, str]:
    """Map each command in a transcript to its output."""
    text = (TUTORIALS / "transcripts" / f"{name}.txt").read_text()
    parts = re.split(r"^\$ (.*)\n", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def bound_to(package: str, page: str, claim: str) -> None:
    """Skip the test if the package is older than the version in the page's claim; fail if newer.

    `claim` is a text on the page, with "{version}" in place of the version. So only the page
    contains the version, and a page that names 2.15 is also about 2.15.1.
    """
    pattern = re.escape(claim).replace(re.escape("{version}"), r"(\d+(?:\.\d+)*)")
    match = re.search(pattern, " ".join((TUTORIALS / page).read_text().split()))
    assert match, f"{page} does not contain {claim!r}"
    named, installed = Version(match[1]), Version(metadata.version(package))
    release = installed.release[: len(named.release)]
    if release < named.release:
        pytest.skip(f"{page} is about {package} {named}, but {installed} is older")
    if release > named.release:
        pytest.fail(
            f'tutorials/{page} says "{match[0]}", but {package} {installed} is installed. Find out '
            "if this is still true. Then update the sentence and its version."
        )


def check(start, number: str, file=None, **options):
    """Run `accel-demo check NUMBER` on `file`, or on the exercise file if `file` is None.

    The time limit is longer than that of the graders, so that they can say what took too long.
    """
    command = ["accel-demo", "check", number, *(["--file", file] if file else [])]
    return start(command, **{"timeout": 240, **options})


def load_grader(number: str):
    """Import the grader of an exercise as a module."""
    spec = importlib.util.spec_from_file_location("grader", EXERCISES / "graders" / f"{number}.py")
    grader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(grader)
    return grader


def load_module(path: Path):
    """Import a program of the tutorials, whose name is not a valid module name."""
    spec = importlib.util.spec_from_file_location(f"page_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mistake_in(grader, answer, *device) -> str:
    """Grade the answer in this process. Return the mistake that the grader finds, or ""."""
    return grading.fill_in({}, grader.observe, Path(answer), *device)["mistake"]
