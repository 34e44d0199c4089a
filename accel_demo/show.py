"""Format tables, and save figures."""

from collections.abc import Sequence
from pathlib import Path

# Okabe and Ito's palette for color-blind readers: https://jfly.uni-koeln.de/color/
COLORS = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#f0e442", "#000000"]


def table(head: Sequence, rows: Sequence[Sequence]) -> str:
    """Return a Markdown table with padded columns, so that it is also readable in a terminal.

    Columns of numbers are right-aligned. Floats are formatted with `str`.
    """
    # An unescaped "|" ends a cell, even inside code: https://github.github.com/gfm/#example-200
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in (head, *rows)]
    columns = range(len(head))
    widths = [max(3, *(len(row[column]) for row in cells)) for column in columns]
    right = [all(_is_number(row[column]) for row in rows) for column in columns]
    lines = []
    for row in cells:
        padded = [
            row[column].rjust(widths[column])
            if right[column]
            else row[column].ljust(widths[column])
            for column in columns
        ]
        lines.append(f"| {' | '.join(padded)} |")
    rule = ["-" * (widths[column] - 1) + (":" if right[column] else "-") for column in columns]
    lines.insert(1, f"| {' | '.join(rule)} |")
    return "\n".join(lines)


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
