"""Draw which rank read which sample, as a heat map with a column per sample and a row per epoch."""

import math

from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from accel_demo.anatomy.shards import in_words
from accel_demo.lab.shards.reading import EpochReads, LoaderReads
from accel_demo.show import COLOURS, new_figure

ROOM_FOR_RANKS = 16  # points; cells of at least this width have room for a rank number
GAP = 0.06  # margin around each cell, as a fraction of the cell's size


def draw(loaders: list[LoaderReads]):
    """Draw a panel for each loader. The colour of a cell shows which rank read the sample.

    If a sample was read more than once, its cell has a frame and is split into one part per read. A
    cross marks a sample that was never read.
    """
    samples, epochs = loaders[0].settings.samples, len(loaders[0].epochs)
    ranks = len(loaders[0].epochs[0].batches)
    width = min(18, max(7.5, 3.2 + 0.27 * samples))  # inches
    legend = _legend(ranks)
    columns = int(width / 1.4)
    below = 0.7 + 0.22 * math.ceil(len(legend) / columns)  # height of the legend area, in inches
    figure = new_figure(width, below + (0.45 + 0.36 * epochs) * len(loaders))
    panels = figure.subplots(len(loaders), 1, sharex=True, squeeze=False)[:, 0]
    room = 72 * (width - 3.2) / samples  # cell width in points
    for axes, loader in zip(panels, loaders, strict=True):
        for row, epoch in enumerate(loader.epochs):
            _draw_epoch(axes, row, _readers(epoch, samples), room)
        axes.set_title(loader.settings.name, loc="left", fontsize=10, fontweight="bold")
        axes.set(xlim=(-0.6, samples - 0.4), ylim=(epochs - 0.45, -0.55))
        axes.set_yticks(range(epochs), [f"epoch {row + 1}" for row in range(epochs)], fontsize=9)
        right = axes.secondary_yaxis("right")
        right.set_yticks(range(epochs), [_summary(epoch, samples) for epoch in loader.epochs])
        for side in (axes, right):
            side.tick_params(length=0, labelsize=9)
            side.spines[:].set_visible(False)
    step = 1 if room >= ROOM_FOR_RANKS else 10 * math.ceil(0.9 * len(str(samples)) / room)
    panels[-1].set_xticks(range(0, samples, step))
    panels[-1].set_xlabel("sample")
    figure.legend(handles=legend, loc="outside lower left", ncols=columns, frameon=False)
    return figure


def _readers(epoch: EpochReads, samples: int) -> list[list[int]]:
    """List the ranks that read each sample. A rank that read a sample twice is listed twice."""
    readers = [[] for _ in range(samples)]
    for rank, batches in enumerate(epoch.batches):
        for batch in batches:
            for sample in batch:
                readers[sample].append(rank)
    return readers


def _draw_epoch(axes, row: int, readers: list[list[int]], room: float) -> None:
    parts, colours, frames, crosses = [], [], [], []
    half = 0.5 - GAP if room >= ROOM_FOR_RANKS else 0.5  # no gaps between tiny cells
    top, bottom = row - 0.5 + GAP, row + 0.5 - GAP
    for sample, ranks in enumerate(readers):
        left, right = sample - half, sample + half
        for number, rank in enumerate(ranks):
            start = left + (right - left) * number / len(ranks)
            end = left + (right - left) * (number + 1) / len(ranks)
            parts.append([(start, top), (end, top), (end, bottom), (start, bottom)])
            colours.append(COLOURS[rank % 6])
            if room >= ROOM_FOR_RANKS * max(1, len(ranks) / 2):
                ink = "white" if sum(to_rgb(COLOURS[rank % 6])) < 1.4 else "black"
                place = (start + end) / 2
                axes.text(place, row, rank, ha="center", va="center", color=ink, fontsize=8)
        if len(ranks) > 1:
            frames.append([(left, top), (right, top), (right, bottom), (left, bottom)])
        if not ranks:
            crosses += [[(left, top), (right, bottom)], [(left, bottom), (right, top)]]
    axes.add_collection(PolyCollection(parts, facecolors=colours, linewidths=0))
    axes.add_collection(PolyCollection(frames, facecolors="none", edgecolors="black", linewidths=2))
    axes.add_collection(LineCollection(crosses, colors="black", linewidths=1.2))


def _summary(epoch: EpochReads, samples: int) -> str:
    """Return the label to the right of an epoch's row."""
    words = in_words(epoch.batches, samples)
    return f"{words}\nas epoch 1" if epoch.same_order_as_epoch_1 else words


def _legend(ranks: int) -> list:
    marks = []
    for rank in range(min(ranks, 6)):  # six colours, so rank 6 has the colour of rank 0
        label = ", ".join(map(str, range(rank, ranks, 6)))
        marks.append(Patch(color=COLOURS[rank], label=f"rank {label}"))
    frame = Patch(facecolor="none", edgecolor="black", linewidth=2, label="read more than once")
    cross = Line2D([], [], color="black", marker="x", linestyle="", label="never read")
    return [*marks, frame, cross]
