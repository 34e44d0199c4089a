"""What `python -m accel_demo.anatomy.model_parallel` prints and draws."""

from fractions import Fraction
from pathlib import Path

import torch
import torch.distributed as dist

from accel_demo.anatomy.flags import command_line, read
from accel_demo.anatomy.model_parallel import splits
from accel_demo.errors import UserError
from accel_demo.processes.group import run_in_group
from accel_demo.show import COLOURS, new_figure, save, table

# What is split, and what travels between the devices.
WAYS = {
    "DDP": ("batch", "gradients"),
    "`.to()`": ("layers, in one process", "activations, their gradients"),
    "pipeline": ("layers, batch in time", "activations, their gradients"),
    "tensor parallel": ("matrix of each layer", "activations, their gradients"),
    "FSDP2": ("each parameter, batch", "parameters, their gradients"),
}
FORWARD, BACKWARD, EMPTY = COLOURS[5], COLOURS[1], "#eeeeee"


def main(description: str | None) -> None:
    """What `python -m accel_demo.anatomy.model_parallel` does."""
    parser = command_line(description, processes=2)
    help = "into how many pieces the pipeline cuts the batch (default: 4)"
    parser.add_argument("--microbatches", type=int, default=4, metavar="M", help=help)
    options = read(parser)
    try:
        splits.check(options.processes, options.microbatches)
    except ValueError as error:
        raise UserError(f"--{error}") from None
    run_in_group(show, options.processes, options)


def show(device: torch.device, options) -> None:
    """Train in all ways; rank 0 prints and draws."""
    ways, moments, logs = splits.train_all(device, options.microbatches)
    if dist.get_rank() > 0:
        return
    grid = splits.timetable(logs)
    print(ways_table(ways, splits.elements(splits.make_model())))
    ranks = [f"rank {rank}" for rank in range(len(logs))]
    print("\nElements of parameters in FSDP2:\n")
    print(table(["when", *ranks], [[moment, *held] for moment, held in moments.items()]))
    print(f"\nThe pipeline with {options.microbatches} micro-batches:\n")
    print(grid_table(grid))
    print(f"\n{bubble_in_words(grid, options.microbatches)}")
    if options.plot:
        draw(grid, options.plot)


def ways_table(ways: dict, elements: int) -> str:
    """One row for each way; `elements` is how many parameters the unsplit model has."""
    held = f"each device holds, of {elements}"
    head = ["way", "what is split", held, "what travels", "result"]
    rows = []
    for way, (held, apart) in ways.items():
        split, travels = WAYS[way]
        rows.append([way, split, ", ".join(map(str, held)), travels, verdict(apart)])
    return table(head, rows)


def verdict(apart: float) -> str:
    """Whether a result is that of the unsplit model. Divided by 3, a sum is rounded."""
    if apart == 0:
        return "the same bits"
    return "within 1e-6" if apart <= 1e-6 else f"differs by {apart:.0e}"


def grid_table(grid: list[dict]) -> str:
    """One row for each rank, one column for each unit of time: F2 is forward of piece 2."""
    times = range(1 + max(time for row in grid for time in row))
    rows = [
        [f"rank {rank}", *(_short(row[time]) if time in row else "." for time in times)]
        for rank, row in enumerate(grid)
    ]
    return table(["time", *map(str, times)], rows)


def bubble_in_words(grid: list[dict], microbatches: int) -> str:
    """The counted share of waiting, beside the formula of the GPipe paper.

    Source: Huang et al., 2018, https://arxiv.org/abs/1811.06965, section 2.3
    """
    stages, counted = len(grid), splits.bubble(grid)
    formula = Fraction(stages - 1, microbatches + stages - 1)
    length = 1 + max(time for row in grid for time in row)
    return (
        f"Each rank waits for {counted * length} of {length} units of time. "
        f"The bubble is {counted}:\n(stages - 1) / (microbatches + stages - 1) = {formula}."
    )


def _short(event: tuple[str, int]) -> str:
    return f"{event[0][0].upper()}{event[1]}"


def draw(grid: list[dict], path: Path) -> None:
    """Who holds what in data and in model parallelism, and below it the pipeline's timetable."""
    length = 1 + max(time for row in grid for time in row)
    width = min(16, max(10, 1 + 0.29 * length))  # inches
    figure = new_figure(width, 6.5)
    ratios = [3.4, 0.7 + 0.45 * len(grid)]
    upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=ratios)[:, 0]
    left, right = upper.subplots(1, 2)
    ranks = len(grid)
    model = splits.make_model()
    stages = [
        {name for name, _ in splits.stage_of(model, rank, ranks).named_parameters()}
        for rank in range(ranks)
    ]
    everything = {name for name, _ in model.named_parameters()}
    _draw_holders(left, model, [everything] * ranks, splits_batch=True)
    left.set_title("Data parallelism: whole model, part of the batch", fontsize=11)
    _draw_holders(right, model, stages, splits_batch=False)
    right.set_title("Model parallelism: part of the model, whole batch", fontsize=11)
    _draw_timetable(lower.subplots(), grid, room=72 * (width - 1) / length)
    save(figure, path)


def _draw_holders(axes, model, held: list[set], splits_batch: bool) -> None:
    """A column for each rank: its rows of the batch below, its layers above, dashed if not held."""
    ranks, width = len(held), 0.62
    for rank, names in enumerate(held):
        for part in range(ranks):
            is_here = part == rank if splits_batch else rank == 0
            low = 0.1 + 0.8 * (ranks - 1 - part) / ranks
            _box(axes, (rank - width / 2, low), (width, 0.8 / ranks), COLOURS[2], is_here)
        for layer, (name, weight) in enumerate(model.named_parameters()):
            corner = (rank - width / 2, 1.6 + 0.85 * layer)
            _box(axes, corner, (width, 0.6), COLOURS[5], name in names)
            if name in names:
                text = f"layer {layer}\n{weight.numel()}"
                axes.text(rank, corner[1] + 0.3, text, ha="center", va="center", fontsize=8)
    for rank in range(ranks - 1):
        last = max(int(name.split(".")[0]) for name in held[rank]) // 2
        for layer in range(4) if splits_batch else [last]:
            y = 1.9 + 0.85 * layer
            ends = {
                "xy": (rank + 0.69, y + (0 if splits_batch else 0.85)),
                "xytext": (rank + 0.31, y),
            }
            style = {"arrowstyle": "<->" if splits_batch else "->", "lw": 1.5}
            axes.annotate("", **ends, arrowprops=style)
    travels = "gradients travel" if splits_batch else "activations travel, their gradients return"
    axes.text((ranks - 1) / 2, 5.15, travels, ha="center", fontsize=9)
    axes.set_xticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_yticks([0.5, 3.2], ["batch", "parameters"])
    axes.tick_params(length=0)
    axes.set_xlim(-0.6, ranks - 0.4)
    axes.set_ylim(0, 5.5)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _box(axes, corner, size, colour, filled: bool) -> None:
    from matplotlib.patches import Rectangle

    style = {"facecolor": colour, "edgecolor": "black"}
    if not filled:
        style = {"facecolor": "white", "edgecolor": "#aaaaaa", "linestyle": "--"}
    axes.add_patch(Rectangle(corner, *size, zorder=2 if filled else 1, **style))


def _draw_timetable(axes, grid: list[dict], room: float) -> None:
    """A box for each unit of time, `room` points wide: a narrow one has its first letter alone."""
    length = 1 + max(time for row in grid for time in row)
    for rank, row in enumerate(grid):
        for time in range(length):
            kind = row[time][0] if time in row else ""
            colour = {"forward": FORWARD, "backward": BACKWARD}.get(kind, EMPTY)
            _box(axes, (time, rank), (1, 1), colour, True)
            if time in row:
                text = _short(row[time])[: None if room >= 20 else 1]
                axes.text(time + 0.5, rank + 0.5, text, ha="center", va="center", fontsize=9)
    axes.set_xlim(0, length)
    axes.set_ylim(len(grid), 0)
    axes.set_yticks(
        [rank + 0.5 for rank in range(len(grid))], [f"rank {r}" for r in range(len(grid))]
    )
    axes.set_xticks(range(0, length + 1, 1 if room >= 20 else 5))
    axes.set_xlabel("time, in units of one forward or one backward of a micro-batch")
    axes.tick_params(left=False)
    axes.set_title(
        f"The pipeline in time: F forward, B backward, grey the bubble ({splits.bubble(grid)})",
        fontsize=11,
    )
