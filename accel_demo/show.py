"""Format tables, and save figures."""

import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from accel_demo import terminal

# Okabe and Ito's palette for color-blind readers: https://jfly.uni-koeln.de/color/
COLORS = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#f0e442", "#000000"]


NARROWEST = 24  # characters: a column with longer cells may be narrowed to this on a terminal


def table(head: Sequence, rows: Sequence[Sequence]) -> str:
    """Return a Markdown table with padded columns, so that it is also readable in a terminal.

    Columns of numbers are right-aligned. Floats are formatted with `str`.

    If stdout is a terminal that is too narrow for the table, long cells continue on more lines. If
    this is not enough, the columns are distributed over several tables. All of them begin with the
    columns that distinguish the rows.
    """
    # An unescaped "|" ends a cell, even inside code: https://github.github.com/gfm/#example-200
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in (head, *rows)]
    columns = [
        TableColumn([row[index] for row in cells], all(_is_number(row[index]) for row in rows))
        for index in range(len(head))
    ]
    width = terminal.columns(sys.stdout)
    if width is None:
        return _lines(columns, [column.width for column in columns])
    parts = _parts_that_fit(columns, width)
    return "\n\n".join(_lines(part, _widths_that_fit(part, width)) for part in parts)


@dataclass(frozen=True)
class TableColumn:
    """The texts of a column, from the head down."""

    cells: list[str]
    is_right_aligned: bool

    @property
    def width(self) -> int:
        return max(3, *map(len, self.cells))

    def least_width(self, table_width: int) -> int:
        """Return how narrow the column may be: two columns fit into a table of this width."""
        longest_word = max(len(word) for cell in self.cells for word in ["", *cell.split()])
        below_head = max(map(len, self.cells[1:]), default=0)
        half = max(3, (table_width - 7) // 2)
        return min(self.width, half, max(3, longest_word, min(below_head, NARROWEST)))

    def full_cells(self) -> list[str]:
        """Return the cells. An empty one means the same as the one above it."""
        cells: list[str] = []
        for cell in self.cells:
            cells.append(cell or cells[-1] if cells else cell)
        return cells


def _lines(columns: list[TableColumn], widths: list[int]) -> str:
    """Return a table as text. Cells that are wider than their column continue on more lines."""
    rule = [
        "-" * (width - 1) + (":" if column.is_right_aligned else "-")
        for column, width in zip(columns, widths, strict=True)
    ]
    head, *rows = zip(*(column.cells for column in columns), strict=True)
    lines = [*_wrapped(head, widths), rule]
    for row in rows:
        lines += _wrapped(row, widths)
    padded = [
        [
            text.rjust(width) if column.is_right_aligned else text.ljust(width)
            for text, column, width in zip(line, columns, widths, strict=True)
        ]
        for line in lines
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def _wrapped(row: Sequence[str], widths: list[int]) -> list[Sequence[str]]:
    """Return the texts of each line of a row. There is only one line if all cells fit."""
    cells = [
        [cell] if len(cell) <= width else textwrap.wrap(cell, width)
        for cell, width in zip(row, widths, strict=True)
    ]
    return list(zip_longest(*cells, fillvalue=""))


def _total(widths: Iterable[int]) -> int:
    """Return the width of a table whose columns have these widths."""
    return 1 + sum(width + 3 for width in widths)


def _parts_that_fit(columns: list[TableColumn], table_width: int) -> list[list[TableColumn]]:
    """Distribute the columns over tables that fit, at the latest after `_widths_that_fit`."""
    keys = columns[: _number_of_keys(columns, table_width)]
    parts = [keys]
    for column in columns[len(keys) :]:
        part = [*parts[-1], column]
        if _total(column.least_width(table_width) for column in part) > table_width:
            parts.append([*keys, column])
        else:
            parts[-1] = part
    return parts


def _number_of_keys(columns: list[TableColumn], table_width: int) -> int:
    """Return how many of the first columns distinguish the rows, or 1 if there is too little room.

    Any other column must fit beside them.
    """
    least = [column.least_width(table_width) for column in columns]
    for count in range(1, len(columns)):
        rows = list(zip(*(column.full_cells() for column in columns[:count]), strict=True))
        if _total([*least[:count], max(least[count:])]) > table_width:
            break
        if len(set(rows)) == len(rows):
            return count
    return 1


def _widths_that_fit(columns: list[TableColumn], table_width: int) -> list[int]:
    """Return the widths of the columns. The widest ones are narrowed until the table fits."""
    widths = [column.width for column in columns]
    least = [column.least_width(table_width) for column in columns]
    while _total(widths) > table_width and widths != least:
        wide = [index for index in range(len(widths)) if widths[index] > least[index]]
        widths[max(wide, key=lambda index: widths[index])] -= 1
    return widths


def _is_number(cell) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool)  # bool is a subclass of int


def new_figure(width: float, height: float):
    """Return an empty matplotlib figure with a white background. The sizes are in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def save(figure, path: Path, warning: str = "") -> None:
    """Save the figure in the format given by the suffix, with a warning below it, if any.

    Equal figures give identical files.
    """
    import matplotlib

    if warning:
        known = figure.get_supxlabel()
        text = f"{known}\n{warning}" if known else warning
        figure.supxlabel(text, fontsize=9, color=COLORS[3])
    with matplotlib.rc_context({"svg.hashsalt": "accel-demo"}):
        metadata = {"Date": None} if Path(path).suffix == ".svg" else None
        figure.savefig(path, dpi=120, metadata=metadata)
