"""The curves of the verb `lr`: learning rate and loss over the images seen by all processes."""

from accel_demo.lab.lr.training import LARGER, LINEAR, RIGHT, ROOT, STEPPED, Trained
from accel_demo.show import COLOURS, new_figure

STYLES = {  # the ways that are drawn; the other two lie on a line of these
    RIGHT.name: {"color": COLOURS[0], "linewidth": 1.5},
    STEPPED.name: {"color": COLOURS[3], "linewidth": 1.8, "linestyle": "--"},
    LARGER.name: {"color": COLOURS[2], "linewidth": 1.5, "marker": "s"},
    ROOT.name: {"color": COLOURS[4], "linewidth": 1.5, "marker": "^"},
    LINEAR.name: {"color": COLOURS[1], "linewidth": 1.5, "marker": "D"},
}
ONE = {"color": "#b8bec5", "linewidth": 6, "solid_capstyle": "butt"}  # others lie upon it


def draw(runs: list[Trained]):
    """A column for each number of processes above one. The first run is the one on one process."""
    counts = sorted({run.processes for run in runs if run.processes > 1})
    figure = new_figure(max(7.5, 4.2 * len(counts)), 6.6)
    grid = figure.subplots(2, len(counts), sharex=True, sharey="row", squeeze=False)
    for (top, bottom), processes in zip(grid.T, counts, strict=True):
        drawn = [run for run in runs if run.processes == processes and run.way.name in STYLES]
        for run in (runs[0], *drawn):
            label, style = "one process", ONE
            if run.processes > 1:
                label = run.way.name.replace("×N", f"×{processes}").replace("×√N", f"×√{processes}")
                style = {**STYLES[run.way.name], "markersize": 5}
            # A learning rate stays until the next step.
            rates = {**style, "marker": "", "where": "post"}
            top.step(run.learning_rates.keys(), run.learning_rates.values(), **rates)
            bottom.plot(run.losses.keys(), run.losses.values(), label=label, **style)
        top.set_title(f"{processes} processes", fontsize=10)
        bottom.set_xlabel("training images seen by all processes together")
        bottom.legend(frameon=False, fontsize=8)
        for axes in (top, bottom):
            axes.spines[["top", "right"]].set_visible(False)
    grid[0, 0].set_ylabel("learning rate")
    grid[1, 0].set_ylabel("loss of test images")
    return figure
