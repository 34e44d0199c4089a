"""Print and draw the results of `python -m accel_demo.anatomy.model_parallel`."""

from fractions import Fraction
from pathlib import Path

import torch
import torch.distributed as dist

from accel_demo.anatomy.model_parallel import splits
from accel_demo.errors import UserError
from accel_demo.options import Parser
from accel_demo.processes.group import run_in_group
from accel_demo.show import COLORS, new_figure, save, table

METHODS = {  # what is split, and what is sent between the devices
    "DDP": ("batch", "gradients"),
    "`.to()`": ("layers, in one process", "activations, their gradients"),
    "pipeline": ("layers, batch in time", "activations, their gradients"),
    "tensor parallel": ("matrix of each layer", "activations, their gradients"),
    "FSDP2": ("each parameter, batch", "parameters, their gradients"),
}
PANELS = {  # title, and what the arrows are
    "DDP": ("DDP: the whole model,\na part of the batch", "gradients are sent (orange)"),
    "FSDP2": (
        "FSDP2: a part of each layer,\na part of the batch",
        "weights are sent (blue),\nand their gradients (orange)",
    ),
    "pipeline": (
        "Pipeline: some layers,\nthe whole batch",
        "activations are sent (blue),\ntheir gradients return (orange)",
    ),
    "tensor parallel": (
        "Tensor parallelism: a part of each\nlayer, the whole batch",
        "activations are added up (blue),\nand their gradients (orange)",
    ),
}
FORWARD, BACKWARD, EMPTY = COLORS[5], COLORS[1], "#eeeeee"


def main(description: str | None) -> None:
    """Run `python -m accel_demo.anatomy.model_parallel`."""
    parser = Parser(description, plot=True, processes=2)
    parser.add_option("--microbatches", 4, "number of micro-batches in the pipeline")
    options = parser.parse_args()
    try:
        splits.check(options.processes, options.microbatches)
    except ValueError as error:
        raise UserError(f"--{error}") from None
    run_in_group(show, options.processes, options)


def show(device: torch.device, options) -> None:
    """Train with all methods. Rank 0 prints and draws the results."""
    comparison = splits.train_all(device, options.microbatches)
    if dist.get_rank() > 0:
        return
    grid = splits.timetable(comparison.pipeline_logs)
    held = f"each device holds, of {splits.elements(splits.make_model())}"
    head = ["method", "what is split", held, "what is sent", "result"]
    rows = []
    for summary in comparison.methods:
        split, sent = METHODS[summary.method]
        held = ", ".join(map(str, summary.elements_held))
        rows.append([summary.method, split, held, sent, verdict(summary.difference)])
    print(table(head, rows))
    print(f"\nThe pipeline with {options.microbatches} micro-batches:\n")
    print(grid_table(grid))
    print(f"\n{bubble_in_words(grid, options.microbatches)}")
    if options.plot:
        draw(grid, options.plot)


def verdict(difference: float) -> str:
    """Describe the difference from the unsplit model. With 3 processes, rounding causes errors."""
    if difference == 0:
        return "the same bits"
    return "within 1e-6" if difference <= 1e-6 else f"differs by {difference:.0e}"


def grid_table(grid: list[dict[int, splits.Chunk]]) -> str:
    """Return a table with a row per rank and a column per unit of time.

    For example, F2 is the forward of micro-batch 2.
    """
    times = range(1 + max(time for row in grid for time in row))
    cells = [[_short(row[time]) if time in row else "." for time in times] for row in grid]
    rows = [[f"rank {rank}", *row] for rank, row in enumerate(cells)]
    return table(["time", *map(str, times)], rows)


def bubble_in_words(grid: list[dict[int, splits.Chunk]], microbatches: int) -> str:
    """Describe how much of the time ranks wait: as counted, and as the GPipe paper predicts.

    Source: Huang et al., 2018, https://arxiv.org/abs/1811.06965, section 2.3
    """
    stages, counted = len(grid), splits.bubble(grid)
    formula = Fraction(stages - 1, microbatches + stages - 1)
    length = 1 + max(time for row in grid for time in row)
    return (
        f"Each rank is idle for {counted * length} of {length} time units. "
        f"The bubble is {counted}:\n(stages - 1) / (microbatches + stages - 1) = {formula}."
    )


def _short(chunk: splits.Chunk) -> str:
    return f"{chunk[0][0].upper()}{chunk[1]}"


def draw(grid: list[dict[int, splits.Chunk]], path: Path) -> None:
    """Draw what each rank stores with each method, above the pipeline's timetable."""
    length = 1 + max(time for row in grid for time in row)
    width = min(16, max(7.2, 1 + 0.29 * length))  # inches
    figure = new_figure(width, 9.6)
    ratios = [7.2, 0.7 + 0.45 * len(grid)]
    upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=ratios)[:, 0]
    for axes, method in zip(upper.subplots(2, 2).flat, PANELS, strict=True):
        _draw_panel(axes, method, ranks=len(grid))
    _draw_timetable(lower.subplots(), grid, room=72 * (width - 1) / length)
    save(figure, path)


def _draw_panel(axes, method: str, ranks: int) -> None:
    """Draw a column per rank, with the batch below the layers. Parts on other ranks are dashed."""
    title, sent = PANELS[method]
    model, width = splits.make_model(), 0.62
    splits_batch = method in ("DDP", "FSDP2")
    for rank in range(ranks):
        for part in range(ranks):
            is_here = part == rank if splits_batch else rank == 0 or method == "tensor parallel"
            low = 0.1 + 0.8 * (ranks - 1 - part) / ranks
            _box(axes, (rank - width / 2, low), (width, 0.8 / ranks), COLORS[2], is_here)
        for layer, weight in enumerate(model.parameters()):
            left, low = rank - width / 2, 1.6 + 0.85 * layer
            _box(axes, (left, low), (width, 0.6), "white", False)
            x, y, wide, high = _held(method, layer, rank, ranks)
            if not wide * high:
                continue
            corner = left + x * width, low + y * 0.6
            _box(axes, corner, (wide * width, high * 0.6), COLORS[5], True)
            text = f"{weight.numel() * wide * high:.0f}"
            if wide * high == 1:
                text = f"layer {layer}\n{text}"
            middle = corner[0] + wide * width / 2, corner[1] + high * 0.3
            axes.text(*middle, text, ha="center", va="center", fontsize=8)
    for rank in range(ranks - 1):
        _draw_arrows(axes, method, rank, ranks)
    axes.text((ranks - 1) / 2, 5.0, sent, ha="center", fontsize=9)
    axes.set_xticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_yticks([0.5, 3.2], ["batch", "parameters"])
    axes.tick_params(length=0)
    axes.set_xlim(-0.6, ranks - 0.4)
    axes.set_ylim(0, 5.7)
    axes.spines[:].set_visible(False)
    axes.set_title(title, fontsize=11)


def _held(method: str, layer: int, rank: int, ranks: int) -> tuple[float, float, float, float]:
    """Return which part of a layer a rank holds: left, low, width and height, from 0 to 1."""
    if method == "DDP":
        return 0, 0, 1, 1
    if method == "pipeline":
        own = layer in _layers_of(rank, ranks)
        return 0, 0, own, own
    if method == "tensor parallel" and layer % 2 == 0:
        return rank / ranks, 0, 1 / ranks, 1  # ColwiseParallel
    return 0, (ranks - 1 - rank) / ranks, 1, 1 / ranks


def _layers_of(rank: int, ranks: int) -> list[int]:
    """Return the layers of a stage of the pipeline."""
    names = splits.stage_of(splits.make_model(), rank, ranks).state_dict()
    return sorted(int(name.split(".")[0]) // 2 for name in names)


def _draw_arrows(axes, method: str, rank: int, ranks: int) -> None:
    """Draw what a rank and the next one send to each other."""
    left, right = rank + 0.31, rank + 0.69
    for layer in range(len(splits.WIDTHS) - 1):
        middle = 1.9 + 0.85 * layer
        if method == "DDP":
            _arrow(axes, (left, middle), (right, middle), "<->", BACKWARD)
        elif method == "FSDP2":
            _arrow(axes, (left, middle + 0.15), (right, middle + 0.15), "<->", FORWARD)
            _arrow(axes, (left, middle - 0.15), (right, middle - 0.15), "<->", BACKWARD)
        elif method == "tensor parallel" and layer % 2:  # after RowwiseParallel
            _arrow(axes, (left, middle + 0.15), (right, middle + 0.15), "<->", FORWARD)
        elif method == "tensor parallel":  # backward of ColwiseParallel
            _arrow(axes, (left, middle - 0.15), (right, middle - 0.15), "<->", BACKWARD)
        elif layer == _layers_of(rank, ranks)[-1]:  # to the next layer, and back
            _arrow(axes, (left, middle + 0.2), (right, middle + 1.0), "->", FORWARD)
            _arrow(axes, (left, middle - 0.15), (right, middle + 0.65), "<-", BACKWARD)


def _arrow(axes, left: tuple, right: tuple, heads: str, color) -> None:
    axes.annotate("", right, left, arrowprops={"arrowstyle": heads, "lw": 2.2, "color": color})


def _box(axes, corner, size, color, filled: bool) -> None:
    from matplotlib.patches import Rectangle

    style = {"facecolor": color, "edgecolor": "black"}
    if not filled:
        style = {"facecolor": "white", "edgecolor": "#aaaaaa", "linestyle": "--"}
    axes.add_patch(Rectangle(corner, *size, zorder=2 if filled else 1, **style))


def _draw_timetable(axes, grid: list[dict[int, splits.Chunk]], room: float) -> None:
    """Draw a box for each unit of time, `room` points wide. A narrow box shows only F or B."""
    length = 1 + max(time for row in grid for time in row)
    for rank, row in enumerate(grid):
        for time in range(length):
            kind = row[time][0] if time in row else ""
            color = {"forward": FORWARD, "backward": BACKWARD}.get(kind, EMPTY)
            _box(axes, (time, rank), (1, 1), color, True)
            if time in row:
                text = _short(row[time])[: None if room >= 20 else 1]
                axes.text(time + 0.5, rank + 0.5, text, ha="center", va="center", fontsize=9)
    axes.set_xlim(0, length)
    axes.set_ylim(len(grid), 0)
    places = [rank + 0.5 for rank in range(len(grid))]
    axes.set_yticks(places, [f"rank {rank}" for rank in range(len(grid))])
    axes.set_xticks(range(0, length + 1, 1 if room >= 20 else 5))
    axes.set_xlabel("time, in units of one forward or one backward of a micro-batch")
    axes.tick_params(left=False)
    axes.set_title(
        f"The pipeline in time: F forward, B backward, gray the bubble ({splits.bubble(grid)})",
        fontsize=11,
    )
