"""Call the programs of accel_demo/anatomy inside a launch, and read what they print and draw."""

import io
import re
from argparse import Namespace
from contextlib import redirect_stdout
from pathlib import Path


def printed(main, device, **options) -> str:
    """Call a program's function `main(device, options)`, and return what it prints on this rank."""
    text = io.StringIO()
    with redirect_stdout(text):
        main(device, Namespace(**options))
    return text.getvalue()


def table_rows(text: str) -> list[list[str]]:
    """Return the cells of all table rows, including the headings, in what a program has printed."""
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows if not set("".join(row)) <= set("-: ")]


def words_in(picture: Path) -> set[str]:
    """Return the texts in an SVG picture."""
    return set(re.findall("<!-- (.*?) -->", picture.read_text()))
