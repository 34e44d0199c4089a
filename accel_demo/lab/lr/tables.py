"""Print and draw the result of `accel-demo lr`."""

import statistics
from pathlib import Path

from accel_demo.lab.lr.result import LearningRateResult, LearningRateRow
from accel_demo.lab.measurements import interval_text, median_interval
from accel_demo.show import COLORS, new_figure, save, table

TOLERANCE = 1e-5  # weights that differ by no more are "equal"; rounding alone causes about 1e-7
HEAD = ["rule", "processes", "global batch", "steps", "peak learning rate", "schedule ends at"]
HEAD += ["weights", "loss difference", "loss"]
LEGEND = f"""
schedule ends at: images seen when the learning rate reached 0. weights: compared with one process,
within {TOLERANCE}. loss difference: mean distance from the loss curve of one process with the same
seed, at equal images seen. loss: on test images, after all training images. Both are medians over
the seeds. In brackets: 90 % confidence interval of the median."""
STYLES = {  # the other two rules have the same curves as "right" and "global batch ×N"
    "right": {"color": COLORS[0], "linewidth": 1.5},
    "scheduler stepped ×N": {"color": COLORS[3], "linewidth": 1.8, "linestyle": "--"},
    "global batch ×N": {"color": COLORS[2], "linewidth": 1.5, "marker": "s"},
    "global batch ×N, learning rate ×√N": {"color": COLORS[4], "linewidth": 1.5, "marker": "^"},
    "global batch ×N, learning rate ×N": {"color": COLORS[1], "linewidth": 1.5, "marker": "D"},
}
ONE_PROCESS = {"color": "#b8bec5", "linewidth": 6, "solid_capstyle": "butt"}  # drawn first


def text(rows: list[LearningRateRow]) -> str:
    """Return the table. `LEGEND` explains its columns."""
    return table(HEAD, [cells_of(row) for row in rows])


def cells_of(row: LearningRateRow) -> list:
    rates = [rate for _, rate in row.learning_rates]
    return [
        *(row.rule, row.processes, row.global_batch, row.optimizer_steps),
        f"{max(rates):.2g}",
        "never" if row.schedule_ends_at is None else row.schedule_ends_at,
        "equal" if row.largest_weight_difference <= TOLERANCE else "different",
        *(median_and_interval(values) for values in (row.loss_differences, row.final_losses)),
    ]


def median_and_interval(values: list[float]) -> str:
    interval, median = median_interval(values), f"{statistics.median(values):.2f}"
    return f"{median} ({interval_text(interval)})" if interval else median


def draw(result: LearningRateResult, path: Path) -> None:
    """Draw a column for each process count except 1: the learning rates, and the losses below."""
    rows = result.rows
    counts = sorted({row.processes for row in rows if row.processes > 1})
    figure = new_figure(max(6.2, 4.2 * len(counts)), 7)
    grid = figure.subplots(2, len(counts), sharex=True, sharey="row", squeeze=False)
    for (top, bottom), processes in zip(grid.T, counts, strict=True):
        drawn = [row for row in rows if row.processes == processes and row.rule in STYLES]
        for row in (rows[0], *drawn):
            label, style = "one process", ONE_PROCESS
            if row.processes > 1:
                label, style = row.rule, {**STYLES[row.rule], "markersize": 5}
            step_style = {**style, "marker": "", "where": "post"}  # constant until the next step
            top.step(*zip(*row.learning_rates, strict=True), **step_style)
            bottom.plot(*zip(*row.losses, strict=True), label=label, **style)
        top.set_title(f"{processes} processes", fontsize=10)
        bottom.set_xlabel("training images seen by all processes together")
        for axes in (top, bottom):
            axes.spines[["top", "right"]].set_visible(False)
    grid[0, 0].set_ylabel("learning rate")
    seeds = len(rows[0].final_losses)
    median = "" if seeds == 1 else f", median of {seeds} seeds"
    grid[1, 0].set_ylabel(f"loss on test images{median}")
    handles, names = grid[1, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    save(figure, path)
