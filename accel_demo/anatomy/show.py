"""What every module here shows in the same way: a table to print, a picture to write."""

from pathlib import Path

# Okabe and Ito's colours, which everyone can tell apart. https://jfly.uni-koeln.de/color/
COLOURS = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#f0e442", "#000000"]


def table(head: list[str], rows: list[list]) -> str:
    """A Markdown table with its columns padded, to be read in a terminal as on a page.

    A column whose cells are all numbers is set to the right; floats come as they print.
    """
    # A bare "|" would end the cell, in code too: https://github.github.com/gfm/#example-200
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
    return isinstance(cell, int | float) and not isinstance(cell, bool)  # True is an int


def new_figure(width: float, height: float):
    """An empty matplotlib figure of this size in inches, on white."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def save(figure, path: Path) -> None:
    """Write the picture so that the same drawing gives the same file, by its suffix."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "accel-demo"}):
        metadata = {"Date": None} if Path(path).suffix == ".svg" else None
        figure.savefig(path, dpi=120, metadata=metadata)
