"""Draw which rank read which sample, as a grid with a column per sample and a row per epoch."""

import math
from collections.abc import Sequence

from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from accel_demo.lab.shards.own import OwnLoader
from accel_demo.lab.shards.result import EpochReads, LoaderReads, readers_of
from accel_demo.show import COLORS, new_figure

ROOM_FOR_RANKS = 13  # points; cells of at least this width have room for a rank number
MARGINS = 1.9  # inches; the width of the labels on both sides
MOST_SAMPLES, MOST_EPOCHS = 400, 20
GAP = 0.08  # margin around each cell, as a fraction of the cell's size


def draw(loaders: Sequence[LoaderReads | OwnLoader]):
    """Draw a panel for each loader. The color of a cell shows which rank read the sample.

    It shows at most the first `MOST_SAMPLES` samples and `MOST_EPOCHS` epochs of each loader. If a
    sample was read more than once, its cell has a frame and is split into one part per read. A
    cross marks a sample that was never read.
    """
    samples = min(MOST_SAMPLES, max(loader.samples for loader in loaders))
    shown = [loader.epochs[:MOST_EPOCHS] for loader in loaders]
    ranks = len(loaders[0].epochs[0].batches)
    width = min(18, max(6, MARGINS + 0.19 * samples))  # inches
    legend = _legend(ranks, loaders)
    columns = int(width / 1.4)
    below = 0.7 + 0.22 * math.ceil(len(legend) / columns)  # height of the legend area, in inches
    heights = [0.45 + 0.46 * len(epochs) for epochs in shown]
    figure = new_figure(width, below + sum(heights))
    grid = {"sharex": True, "squeeze": False, "height_ratios": heights}
    panels = figure.subplots(len(loaders), 1, **grid)[:, 0]
    room = 72 * (width - MARGINS) / samples  # cell width in points
    for axes, loader, epochs in zip(panels, loaders, shown, strict=True):
        part = min(samples, loader.samples)
        for row, epoch in enumerate(epochs):
            readers = readers_of(epoch.batches, part)
            _draw_epoch(axes, row, readers, room, has_crosses=epoch.never is not None)
        rest = f" (the first {part} of {loader.samples:,} samples)" if part < loader.samples else ""
        axes.set_title(f"{loader.name}{rest}", loc="left", fontsize=10, fontweight="bold")
        axes.set(xlim=(-0.6, samples - 0.4), ylim=(len(epochs) - 0.45, -0.55))
        rows = range(len(epochs))
        axes.set_yticks(rows, [f"epoch {row + 1}" for row in rows], fontsize=9)
        right = axes.secondary_yaxis("right")
        right.set_yticks(rows, [_summary(epoch) for epoch in epochs])
        for side in (axes, right):
            side.tick_params(length=0, labelsize=9)
            side.spines[:].set_visible(False)
    step = 1 if room >= ROOM_FOR_RANKS else 10 * math.ceil(0.9 * len(str(samples)) / room)
    panels[-1].set_xticks(range(0, samples, step), range(0, samples, step), fontsize=8)
    panels[-1].set_xlabel("sample")
    figure.legend(handles=legend, loc="outside lower left", ncols=columns, frameon=False)
    return figure


def _draw_epoch(axes, row: int, readers: list[list[int]], room: float, has_crosses: bool) -> None:
    parts, colors, frames, crosses = [], [], [], []
    half = 0.5 - GAP if room >= ROOM_FOR_RANKS else 0.5  # no gaps between tiny cells
    top, bottom = row - 0.5 + GAP, row + 0.5 - GAP
    for sample, ranks in enumerate(readers):
        left, right = sample - half, sample + half
        for number, rank in enumerate(ranks):
            start = top + (bottom - top) * number / len(ranks)
            end = top + (bottom - top) * (number + 1) / len(ranks)
            parts.append([(left, start), (right, start), (right, end), (left, end)])
            colors.append(COLORS[rank % 6])
            if room >= ROOM_FOR_RANKS and len(ranks) <= 2:
                red, green, blue = to_rgb(COLORS[rank % 6])
                is_dark = 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.45
                ink = "white" if is_dark else "black"
                style = {"ha": "center", "va": "center_baseline", "color": ink, "fontsize": 9}
                axes.text(sample, (start + end) / 2, rank, **style)
        if len(ranks) > 1:
            frames.append([(left, top), (right, top), (right, bottom), (left, bottom)])
        if not ranks and has_crosses:
            crosses += [[(left, top), (right, bottom)], [(left, bottom), (right, top)]]
    axes.add_collection(PolyCollection(parts, facecolors=colors, linewidths=0))
    outline = {"facecolors": "none", "edgecolors": "black", "linewidths": 1.5}
    axes.add_collection(PolyCollection(frames, **outline))
    axes.add_collection(LineCollection(crosses, colors="black", linewidths=1.2))


def _summary(epoch: EpochReads) -> str:
    """Return the label to the right of an epoch's row."""
    parts = []
    if epoch.more_than_once:
        parts.append(f"{len(epoch.more_than_once)} more than once")
    if epoch.never and epoch.is_complete:
        parts.append(f"{len(epoch.never)} never read")
    if epoch.same_order_as_epoch_1:
        parts.append("order of epoch 1")
    if not epoch.is_complete:
        parts.append("not read to its end")
    return "\n".join(parts) or "each once"


def _legend(ranks: int, loaders: Sequence[LoaderReads | OwnLoader]) -> list:
    marks = []
    for rank in range(min(ranks, 6)):  # six colors, so rank 6 has the color of rank 0
        label = ", ".join(map(str, range(rank, ranks, 6)))
        marks.append(Patch(color=COLORS[rank], label=f"rank {label}"))
    epochs = [epoch for loader in loaders for epoch in loader.epochs]
    if any(epoch.more_than_once for epoch in epochs):
        frame = {"facecolor": "none", "edgecolor": "black", "linewidth": 1.5}
        marks.append(Patch(**frame, label="read more than once"))
    if any(epoch.never for epoch in epochs):
        cross = Line2D([], [], color="black", marker="x", linestyle="", label="never read")
        marks.append(cross)
    return marks
