"""The picture of `accel-demo bench precision`: a row of panels for each network."""

import statistics
from pathlib import Path

from accel_demo import show

TITLES = ("images/s", "MB a step allocates at most", "first step in s", "loss")


def draw(found: dict[str, dict], path: Path) -> None:
    """Bars for speed (its lowest and highest turn as a line), memory and first step; loss curves.

    `found` has what `precision.compare` gives, for each network.
    """
    from matplotlib.ticker import MaxNLocator

    figure = show.new_figure(10, 2.4 * len(found) + 0.3)
    grid = figure.subplots(len(found), 4, squeeze=False, width_ratios=[3, 3, 3, 4])
    for (model, ways), row in zip(found.items(), grid, strict=True):
        colours = dict(zip(ways, show.COLOURS, strict=False))
        for axis, key in zip(
            row, ("images_per_second", "megabytes", "first_seconds"), strict=False
        ):
            bars(axis, ways, colours, key)
            axis.set_yticks(range(len(ways)), list(ways) if axis is row[0] else [])
        for width, (name, result) in zip((7, 5, 2.5, 1), ways.items(), strict=False):
            style = "--" if "compiled" in name else "-"
            steps = range(2, 2 + len(result["losses"]))  # the first is told apart
            options = {"color": colours[name], "linewidth": width, "label": name}
            row[3].plot(steps, result["losses"], style, **options)  # they may lie on each other
        row[3].margins(y=0.3)
        row[3].set_ylim(bottom=0)
        row[3].xaxis.set_major_locator(MaxNLocator(5, integer=True))
        row[3].set_xlabel("step", fontsize=8)
        row[3].legend(fontsize=8, frameon=False, loc="lower left")
        row[0].set_ylabel(f"{model}\n{ways['fp32']['batch_size']} images per step", fontsize=9)
        for axis, title in zip(row, TITLES, strict=True):
            axis.set_title(title, loc="left", fontsize=9)
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(labelsize=8)
    show.save(figure, path)


def bars(axis, ways: dict[str, dict], colours: dict[str, str], key: str) -> None:
    """A bar for each way, to the median, with its number at the end."""
    for place, (name, result) in enumerate(ways.items()):
        values = result[key] if isinstance(result[key], list) else [result[key]]
        median = statistics.median(values)
        spread = [[median - min(values)], [max(values) - median]] if len(values) > 1 else None
        hatch = "///" if "compiled" in name else None
        axis.barh(place, median, xerr=spread, color=colours[name], capsize=2, hatch=hatch)
        number, end = f"{median:,.0f}" if median >= 10 else f"{median:.1f}", (max(values), place)
        options = {"textcoords": "offset points", "va": "center", "fontsize": 8}
        axis.annotate(number, end, (4, 0), **options)
    axis.invert_yaxis()
    axis.margins(x=0.3)
    axis.set_xlim(left=0)
