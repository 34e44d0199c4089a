"""Draw what each collective moves: the picture of `collectives --plot`."""

from pathlib import Path

from accel_demo import show


def draw(examples: list[tuple[str, list[tuple[list[int], list[int]]]]], path: Path) -> None:
    """Before and after of each collective: a line for each rank, colours for whose it was.

    An example is the collective's name, and by rank the numbers it has before and after.
    """
    world_size = len(examples[0][1])
    cell = max(0.42, 0.15 + 0.09 * world_size)  # in inches: more ranks have longer numbers
    width, height = 2 * world_size + 2.6, world_size + 0.4 / cell
    figure = show.new_figure(2 * width * cell, 4 * height * cell)
    for axes, (name, shown) in zip(figure.subplots(4, 2).flat, examples, strict=True):
        for rank, pair in enumerate(shown):
            axes.text(-0.2, rank + 0.5, f"rank {rank}", ha="right", va="center", fontsize=9)
            for left, numbers in zip((0, world_size + 1), pair, strict=True):
                for column, number in enumerate(numbers):
                    _draw_cell(axes, left + column, rank, number)
        axes.text(world_size + 0.5, world_size / 2, "→", ha="center", va="center", fontsize=16)
        axes.set_title(name, fontsize=12, loc="left")
        axes.set(xlim=(-1.6, 2 * world_size + 1), ylim=(world_size, 0), aspect="equal")
        axes.axis("off")
    show.save(figure, path)


def _draw_cell(axes, left: int, top: int, number: int) -> None:
    """A square with a number in it, and a stripe for each rank that had a part in it."""
    parts = [rank for rank, digit in enumerate(reversed(str(number))) if digit != "0"]
    for index, rank in enumerate(parts):
        width, colour = 1 / len(parts), show.COLOURS[rank]
        axes.bar(left + index * width, 1, width, top, align="edge", color=colour, alpha=0.5)
    axes.bar(left, 1, 1, top, align="edge", fill=False, edgecolor="white", linewidth=2)
    axes.text(left + 0.5, top + 0.5, str(number), ha="center", va="center", fontsize=9)
