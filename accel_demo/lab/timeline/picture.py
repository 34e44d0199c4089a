"""Draw a timeline with two lanes per rank: one for its activity, and one for collectives."""

import textwrap

from accel_demo.lab.timeline.result import (
    Bar,
    BucketTrial,
    TimelineResult,
    row_count,
    step_spans,
    steps_shown,
    whole_span,
)
from accel_demo.lab.timeline.tables import verdict
from accel_demo.show import COLORS, new_figure

COLOR_OF = {
    "data wait": COLORS[4],
    "forward": COLORS[0],
    "backward": COLORS[5],
    "rank wait": "#f5cf7a",
    "message wait": COLORS[1],
    "optimizer": COLORS[2],
    "other": "#d8dce1",
    "collective": "#8a5a00",
}
SLOW = COLORS[3]
ACTIVITY = "main thread", "GPU"  # what the first lane shows, on a CPU and on a GPU


def figure_of(result: TimelineResult):
    """Return a figure with lanes and a legend, and with two plots if bucket sizes were compared."""
    from matplotlib.patches import Patch

    lane_rows = sum(row_count(lane) for rank in result.ranks for lane in rank.lanes.values())
    heights = [1.4 + 0.34 * lane_rows + 0.2 * len(result.ranks), 0.55] + [2.6] * bool(result.sweep)
    figure = new_figure(8, sum(heights))
    rows: list = [["lanes"] * 2, ["legend"] * 2] + [["shares", "lengths"]] * bool(result.sweep)
    panels = figure.subplot_mosaic(rows, height_ratios=heights)
    _draw_lanes(panels["lanes"], result)
    panels["legend"].set_axis_off()
    patches = [Patch(color=color, label=phase) for phase, color in COLOR_OF.items()]
    style = {"ncols": 4, "fontsize": 9, "frameon": False, "loc": "center"}
    panels["legend"].legend(handles=patches, **style)
    if result.sweep:
        _draw_sweep(panels["shares"], panels["lengths"], result.sweep)
    return figure


def _draw_lanes(axes, result: TimelineResult) -> None:
    top, ticks, labels = 0.0, [], []
    start, end = whole_span(result.ranks)
    for rank in result.ranks:
        height = sum(row_count(lane) for lane in rank.lanes.values())
        is_slow = rank.rank == result.straggler
        if is_slow:
            axes.axhspan(top - 0.2, top + height + 0.2, color=SLOW, alpha=0.12, linewidth=0)
        for step in steps_shown(rank):
            for edge in (step.start_ms, step.end_ms):
                axes.plot([edge, edge], [top - 0.15, top + height + 0.15], color="#57606a", lw=0.8)
        name = f"rank {rank.rank}{' (slow)' if is_slow else ''}"
        labels += [f"{name}\n{ACTIVITY[result.device != 'cpu']}", "collectives"]
        for lane in rank.lanes.values():
            _draw_bars(axes, lane, top, (end - start) / 400)
            ticks.append(top + row_count(lane) / 2)
            top += row_count(lane)
        top += 0.6
    axes.set_yticks(ticks, labels, fontsize=9)
    for label in axes.get_yticklabels():
        label.set_color(SLOW if "(slow)" in label.get_text() else "black")
    axes.set_ylim(top - 0.3, -1.0)
    last_label = float("-inf")
    for number, (step_start, step_end) in step_spans(result.ranks).items():
        middle = (step_start + step_end) / 2
        if middle - last_label > (end - start) / 12:
            axes.text(middle, -0.6, f"step {number}", fontsize=9, ha="center", va="center")
            last_label = middle
    axes.set_xlim(start, end)
    axes.set_xlabel("ms since the first step shown, on one clock", fontsize=9)
    axes.tick_params(axis="x", labelsize=9)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    lines = textwrap.wrap(result.description, 80)
    lines += [line for text in verdict(result) for line in textwrap.wrap(text, 80)]
    axes.set_title("\n".join(lines), fontsize=10, loc="left")


def _draw_bars(axes, lane: list[Bar], top: float, visible_ms: float) -> None:
    """Draw the bars of a lane in one call per row and phase, as there can be thousands of bars.

    A bar that is shorter than `visible_ms` has no white edge, because the edge would hide it.
    """
    for row in range(row_count(lane)):
        for phase, color in COLOR_OF.items():
            bars = [bar for bar in lane if (bar.row, bar.phase) == (row, phase)]
            spans = [(bar.start_ms, bar.end_ms - bar.start_ms) for bar in bars]
            edges = [color if width < visible_ms else "white" for _, width in spans]
            if spans:
                place = (top + row + 0.1, 0.8)
                axes.broken_barh(spans, place, fc=color, ec=edges, linewidth=0.4, zorder=3)


def _draw_sweep(share_axes, step_axes, sweep: list[BucketTrial]) -> None:
    """Plot the hidden share of the all-reduce and the step time against the bucket size."""
    sweep = sorted(sweep, key=lambda trial: trial.bucket_mb)
    sizes = [trial.bucket_mb for trial in sweep]
    shares = [100 * trial.hidden_share for trial in sweep]
    lengths = [trial.step_ms for trial in sweep]
    share_axes.plot(sizes, shares, "o-", color=COLORS[1], linewidth=1.5)
    step_axes.plot(sizes, lengths, "o-", color=COLORS[0], linewidth=1.5)
    if all(trial.step_interval for trial in sweep):
        low, high = zip(*(trial.step_interval for trial in sweep), strict=True)
        step_axes.vlines(sizes, low, high, color=COLORS[0], linewidth=1)
    for axes, highest, title in (
        (share_axes, 105, "all-reduce hidden under backward (%)"),
        (step_axes, max(lengths) * 1.15, "step time (ms), with 90 % interval"),
    ):
        axes.set_xscale("log")
        axes.set_xticks(sizes, [f"{size:g}" for size in sizes], fontsize=9)
        axes.minorticks_off()
        axes.set_ylim(0, highest)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("bucket_cap_mb of DDP (MiB)", fontsize=9)
        axes.tick_params(axis="y", labelsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#d0d7de", linewidth=0.6)
