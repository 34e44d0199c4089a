"""The lanes of a timeline drawn: per rank what it computed, and below what it sent meanwhile."""

from pathlib import Path

from accel_demo.show import COLOURS, new_figure, save
from accel_demo.wording import counted

COLOUR_OF = {
    "data wait": COLOURS[4],
    "forward": COLOURS[0],
    "backward": COLOURS[5],
    "all-reduce": COLOURS[1],
    "optimizer": COLOURS[2],
    "idle": "#d8dce1",
}
SLOW = COLOURS[3]
LANES = ("compute", "communication")


def draw(found: dict, path: Path) -> None:
    """Draw what `timeline` found; below it the bucket sizes where several were tried."""
    save(figure_of(found), path)


def figure_of(found: dict):
    """The picture as a matplotlib figure: lanes, legend, and two axes of the sweep."""
    lanes, sweep = lanes_of(found), found["sweep"]
    rows = sum(lane["rows"] for lane in lanes)
    heights = [1.4 + 0.34 * rows + 0.2 * len(found["ranks"]), 0.3] + ([2.6] if sweep else [])
    figure = new_figure(11, sum(heights))
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    _draw_lanes(figure.add_subplot(grid[0, :]), found, lanes)
    _draw_legend(figure.add_subplot(grid[1, :]), found["phases"])
    if sweep:
        _draw_sweep([figure.add_subplot(grid[2, column]) for column in (0, 1)], sweep)
    return figure


def lanes_of(found: dict) -> list[dict]:
    """Two lanes per rank. Each bar has a `row` in its lane: those at the same time lie in several.

    Two all-reduces may be under way at once: gloo has two threads.
    """
    lanes = []
    for rank in found["ranks"]:
        for name in LANES:
            bars = [bar for bar in rank["bars"] if bar["lane"] == name]
            bars.sort(key=lambda bar: (bar["start_ms"], -bar["end_ms"]))
            ends = [float("-inf")]  # of the last bar in each row
            placed = []
            for bar in bars:
                free = [row for row, end in enumerate(ends) if end <= bar["start_ms"] + 1e-6]
                row = free[0] if free else len(ends)
                ends[row:] = [bar["end_ms"], *ends[row + 1 :]]
                placed.append({**bar, "row": row})
            lanes.append({"rank": rank["rank"], "lane": name, "rows": len(ends), "bars": placed})
    return lanes


def steps_of(found: dict) -> list[dict]:
    """Each step from when the first rank began it until the last one had ended it."""
    spans: dict = {}
    for rank in found["ranks"]:
        for step in rank["steps"]:
            start, end = spans.get(step["step"], (step["start_ms"], step["end_ms"]))
            spans[step["step"]] = min(start, step["start_ms"]), max(end, step["end_ms"])
    return [{"step": step, "start_ms": a, "end_ms": b} for step, (a, b) in sorted(spans.items())]


def whole_of(found: dict) -> tuple[float, float]:
    """From when to when (ms) there is anything to show, over all ranks."""
    shown = [part for rank in found["ranks"] for part in (*rank["steps"], *rank["bars"])]
    return min(part["start_ms"] for part in shown), max(part["end_ms"] for part in shown)


def what_ran(found: dict) -> str:
    """One line on the run that was profiled."""
    sizes = [f"{size / 2**20:.2f}" for size in found["bucket_bytes"]]
    sizes = " + ".join(sizes) + " MiB" if len(sizes) <= 4 else f"{len(sizes)} buckets"
    buckets = f", bucket_cap_mb {found['bucket_mb']:g} ({sizes})" if found["bucket_bytes"] else ""
    where = f"{found['device']} ({found['backend']})"
    run = f"{counted(found['processes'], 'connected process')} on {where}: {found['model']}"
    several = f", {found['accumulate']} to a step" if found["accumulate"] > 1 else ""
    return f"{run}, batches of {found['batch_size']} images per process{several}{buckets}"


def verdict(found: dict) -> str:
    """Which rank the others wait for, in words."""
    slow = found["straggler"]
    if slow:
        return f"rank {slow['rank']} is slow: by {slow['slower_ms']:.1f} ms in each step"
    if found["processes"] == 1:
        return "one process waits for nobody"
    return "no rank is slower than the others in each step"


def _draw_lanes(axes, found: dict, lanes: list[dict]) -> None:
    slow = found["straggler"] and found["straggler"]["rank"]
    top, ticks, words = 0.0, [], []
    start, end = whole_of(found)
    for rank in found["ranks"]:
        own = [lane for lane in lanes if lane["rank"] == rank["rank"]]
        height = sum(lane["rows"] for lane in own)
        is_slow = rank["rank"] == slow
        if is_slow:
            axes.axhspan(top - 0.2, top + height + 0.2, color=SLOW, alpha=0.12, linewidth=0)
        for step in rank["steps"]:
            for at in (step["start_ms"], step["end_ms"]):
                axes.plot([at, at], [top - 0.15, top + height + 0.15], color="#57606a", lw=0.8)
        for lane in own:
            _draw_bars(axes, lane, top, (end - start) / 400)
            ticks.append(top + lane["rows"] / 2)
            head = f"rank {rank['rank']}{' (slow)' if is_slow else ''}   "
            words.append((head if lane["lane"] == "compute" else "") + lane["lane"])
            top += lane["rows"]
        top += 0.6
    axes.set_yticks(ticks, words, fontsize=9)
    for label in axes.get_yticklabels():
        label.set_color(SLOW if "(slow)" in label.get_text() else "black")
    axes.set_ylim(top - 0.3, -1.0)
    named = float("-inf")  # where the last name of a step is
    for step in steps_of(found):
        middle = (step["start_ms"] + step["end_ms"]) / 2
        if middle - named > (end - start) / 16:
            axes.text(middle, -0.6, f"step {step['step']}", fontsize=9, ha="center", va="center")
            named = middle
    axes.set_xlim(start, end)
    axes.set_xlabel("ms since the first step shown, on one clock", fontsize=9)
    axes.tick_params(axis="x", labelsize=9)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(f"{what_ran(found)}\n{verdict(found)}", fontsize=10, loc="left")


def _draw_bars(axes, lane: dict, top: float, visible_ms: float) -> None:
    """All bars of a phase in one call: there may be thousands. A short one is all edge."""
    for row in range(lane["rows"]):
        for phase, colour in COLOUR_OF.items():
            bars = [bar for bar in lane["bars"] if (bar["row"], bar["phase"]) == (row, phase)]
            spans = [(bar["start_ms"], bar["end_ms"] - bar["start_ms"]) for bar in bars]
            edges = [colour if width < visible_ms else "white" for _, width in spans]
            if spans:
                box = (top + row + 0.1, 0.8)
                axes.broken_barh(spans, box, fc=colour, ec=edges, linewidth=0.4, zorder=3)


def _draw_legend(axes, phases: list[str]) -> None:
    from matplotlib.patches import Patch

    axes.set_axis_off()
    patches = [Patch(color=COLOUR_OF[phase], label=phase) for phase in phases]
    axes.legend(handles=patches, ncols=len(phases), fontsize=9, frameon=False, loc="center")


def _draw_sweep(all_axes: list, sweep: list[dict]) -> None:
    """What the size of the buckets does: how much hides, and how long a step takes."""
    sweep = sorted(sweep, key=lambda row: row["bucket_mb"])
    sizes = [row["bucket_mb"] for row in sweep]
    shares = [100 * row["hidden_share"] for row in sweep]
    lengths = [row["step_ms"] for row in sweep]
    for axes, values, title, colour in (
        (all_axes[0], shares, "all-reduce hidden under backward (%)", COLOURS[1]),
        (all_axes[1], lengths, "length of a step (ms)", COLOURS[0]),
    ):
        axes.plot(sizes, values, "o-", color=colour, linewidth=1.5)
        axes.set_xscale("log")
        axes.set_xticks(sizes, [f"{size:g}" for size in sizes], fontsize=9)
        axes.minorticks_off()
        axes.set_ylim(0, 105 if axes is all_axes[0] else max(values) * 1.15)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("bucket_cap_mb of DDP (MiB)", fontsize=9)
        axes.tick_params(axis="y", labelsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#d0d7de", linewidth=0.6)
