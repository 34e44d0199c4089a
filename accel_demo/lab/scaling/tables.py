"""Show the result of `accel-demo scaling` as tables and as a picture."""

import math
import shlex
import statistics
from pathlib import Path

from accel_demo.lab import hosts, load
from accel_demo.lab.measurements import interval_text
from accel_demo.lab.observed.observation import processes_in_words
from accel_demo.lab.scaling.fit import LAWS, SerialShareFit
from accel_demo.lab.scaling.own import SKIPPED, OwnScalingResult, OwnScalingRow
from accel_demo.lab.scaling.result import GilRow, ScalingResult, ScalingRow
from accel_demo.show import COLORS, new_figure, save, table
from accel_demo.terminal import fill
from accel_demo.wording import counted

NOTHING = (math.nan, math.nan)  # error bars that are not drawn
STYLES = {  # color, marker, and a horizontal offset so that markers do not overlap
    "plain PyTorch": (COLORS[7], "D", -0.05),
    "raw DDP": (COLORS[0], "o", 0.0),
    "Accelerate": (COLORS[1], "s", 0.05),
}
BATCHES = {"strong": "global batch", "weak": "batch per process"}
NEARLY = 0.05  # numbers of samples that differ by this share are equal


def text(result: ScalingResult) -> str:
    """Return the tables as text, with sentences that explain them."""
    threads = counted(result.threads, "thread")
    counts = ", ".join(map(str, result.processes))
    counts += " connected process" if counts == "1" else " connected processes"
    rate = f", each sending at most {hosts.rate_text(result.rate)}" if result.rate else ""
    parts = [
        f"{result.model} on {result.device}, {'a GPU' if result.device == 'cuda' else threads} "
        f"each; {counts}{rate}; medians of {counted(result.repeats, 'interleaved repeat')}"
    ]
    for scaling, batch in BATCHES.items():
        parts.append(f"{scaling.capitalize()} scaling: the {batch} is {result.batch_size} images.")
        parts.append(scaling_table([row for row in result.rows if row.scaling == scaling]))
    if result.rate:
        times = [
            hosts.sending_time(result.gradient_bytes, count, result.rate)
            for count in result.processes
            if count > 1
        ]
        parts.append("\n".join(times))
    if result.fits:
        parts += [fits_table(result.fits), explain_fits(result.fits)]
    crowded = [count for count in result.processes if count * result.threads > result.cores]
    if crowded and result.device != "cuda":
        counts = " and ".join(map(str, crowded)) + (" process" if crowded == [1] else " processes")
        parts.append(
            f"{counts} with {threads} each share {counted(result.cores, 'core')}: "
            "threads take turns on a core, so do not expect a speed-up from more threads."
        )
    head, cells = ["work, in two parts", "workers", "times as fast", "90 % interval"], []
    for row in result.gil_rows:
        speedup = (f"{row.median_speedup:.2f}", interval_text(row.interval))
        cells.append([row.work, row.workers, *speedup, f"{row.cores_busy:.2f}"])
    parts.append(table([*head, "cores busy"], cells))
    parts.append(f"This Python has {'the' if result.has_gil else 'no'} global interpreter lock.")
    return "\n\n".join(parts)


def scaling_table(rows: list[ScalingRow]) -> str:
    head = ["version", "processes", "batch", "images/s", "min – max", "speed-up", "90 % interval"]
    cells = []
    for row in rows:
        case = (row.version, row.processes, f"{row.processes} × {row.batch_size}")
        rates = row.images_per_second
        speed = (f"{statistics.median(rates):,.0f}", f"{min(rates):,.0f} – {max(rates):,.0f}")
        speedup = (f"{row.median_speedup:.2f}", interval_text(row.interval))
        cells.append([*case, *speed, *speedup, f"{row.efficiency:.0%}"])
    return table([*head, "efficiency"], cells)


def fits_table(fits: list[SerialShareFit]) -> str:
    head = ["fit", "version", "serial share", "90 % interval", "largest misfit"]
    rows = []
    for fit in fits:
        name = f"{fit.law.capitalize()}, {fit.scaling} scaling"
        share = (f"{fit.serial_share:.3f}", interval_text(fit.interval, digits=3))
        rows.append([name, fit.version, *share, f"{fit.misfit:.0%}"])
    return table(head, rows)


def explain_fits(fits: list[SerialShareFit]) -> str:
    """Return sentences that explain the fits and their limits."""
    shares = [fit.serial_share for fit in fits]
    sentences = ["The serial share is relative to the same version in one process."]
    if max(shares) > 1:
        sentences.append("Above 1: slower than one process. No serial share explains that.")
    if min(shares) < 0:
        sentences.append("Below 0: faster than the ideal. No serial share explains that.")
    if max(shares) > 1 or min(shares) < 0:
        sentences.append("Noise is another cause: check if the whole interval is outside 0 to 1.")
    return " ".join(sentences)


def draw(result: ScalingResult, path: Path) -> None:
    """Draw strong and weak scaling side by side, and below, threads compared with processes."""
    figure = new_figure(6.2, 7)
    panels = figure.subplot_mosaic([["strong", "weak"], ["threads", "threads"]])
    for scaling in BATCHES:
        draw_scaling(panels[scaling], result, scaling)
    draw_gil(panels["threads"], result.gil_rows)
    panels["weak"].set_ylabel("")
    panels["weak"].sharey(panels["strong"])
    figure.set_layout_engine("constrained", hspace=0.06)
    has_intervals = all(row.interval for row in result.rows)
    bars = "90 % intervals of the medians" if has_intervals else "none, with fewer than 5 repeats"
    figure.supxlabel(f"error bars: {bars}", fontsize=9)
    if result.rate:
        rate = hosts.rate_text(result.rate)
        figure.suptitle(f"each process sends at most {rate}", fontsize=10)
    for axis in panels.values():
        axis.spines[["top", "right"]].set_visible(False)
    # Strong and weak scaling share one legend. Legends are outside, so that they cover no point.
    handles, labels = panels["strong"].get_legend_handles_labels()
    more = zip(*panels["weak"].get_legend_handles_labels(), strict=True)
    entries = [*zip(handles, labels, strict=True), *[one for one in more if one[1] not in labels]]
    beside = {"frameon": False, "fontsize": 9, "loc": "center left", "bbox_to_anchor": (1, 0.5)}
    panels["weak"].legend(*zip(*entries, strict=True), **beside)
    panels["threads"].legend(**beside)
    save(figure, path, load.warning())


def draw_scaling(axis, result: ScalingResult, scaling: str) -> None:
    cores, top = result.cores / result.threads, result.processes[-1]
    axis.plot([1, max(2, top)], [1, max(2, top)], color="0.55", linestyle="--", label="ideal")
    if result.device == "cpu" and top > cores:
        axis.axvspan(max(1, cores), top + 0.25, color="0.93", label="cores are shared")
    rows = [row for row in result.rows if row.scaling == scaling]
    start = {row.version: row.median_speedup for row in rows if row.processes == 1}
    for fit in result.fits:
        if fit.scaling == scaling:
            line = [1 + (top - 1) * step / 50 for step in range(51)]
            speedups = [LAWS[scaling](fit.serial_share, count) for count in line]
            heights = [start[fit.version] * speedup for speedup in speedups]
            label = f"{fit.law.capitalize()}, share {fit.serial_share:.2f}"
            axis.plot(line, heights, color=STYLES[fit.version][0], linewidth=1.2, label=label)
    for version, (color, marker, offset) in STYLES.items():
        points = [row for row in rows if row.version == version]
        axis.errorbar(
            [row.processes + offset * max(1, top - 1) for row in points],
            [row.median_speedup for row in points],
            yerr=error_bars(points),
            label=version,
            **{"color": color, "marker": marker, "markersize": 6, "linestyle": "none"},
            capsize=3,
        )
    title = f"{scaling.capitalize()} scaling:\n{BATCHES[scaling]} {result.batch_size}"
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("processes")
    axis.set_ylabel("times as fast as plain\nPyTorch in one process")
    axis.set_xticks(result.processes)
    highest = max(max(row.interval, default=row.median_speedup) for row in rows)
    axis.set_ylim(0, max(2, top, highest) * 1.05)


def draw_gil(axis, rows: list[GilRow]) -> None:
    """Draw a group of bars for each kind of work."""
    from accel_demo.anatomy.gil import PARTS  # slow: imports torch

    works = list(dict.fromkeys(row.work for row in rows))
    for index, workers in enumerate(dict.fromkeys(row.workers for row in rows)):
        bars = [row for row in rows if row.workers == workers]
        places = [place + (index - 1) * 0.27 for place in range(len(works))]
        heights = [row.median_speedup for row in bars]
        whiskers = {"yerr": error_bars(bars), "ecolor": "black", "capsize": 3}
        axis.bar(places, heights, 0.25, color=COLORS[index], label=workers, **whiskers)
    axis.axhline(PARTS, color="0.55", linewidth=1, linestyle="--", label="ideal")
    axis.set_xticks(range(len(works)), [work.replace(" in ", "\nin ") for work in works])
    axis.set_ylabel("times as fast as\none after the other")
    axis.set_title("Work in two parts: Python's global lock", fontsize=10)
    highest = max(max(row.interval, default=row.median_speedup) for row in rows)
    axis.set_ylim(0, max(PARTS, highest) * 1.1)


def text_of_script(result: OwnScalingResult) -> str:
    """Return the result as text for the terminal."""
    processes = processes_in_words(result.processes, result.started)
    threads = f"{result.device}, {counted(result.threads, 'thread')} each"
    rows = []
    for row in result.rows:
        samples = f"{row.samples_per_second:,.0f}" if row.samples_per_step else "unknown"
        speedup = f"{row.median_speedup:.2f}", interval_text(row.interval)
        step = f"{statistics.median(row.ms_per_step):.1f}"
        rows.append([row.processes, step, samples, *speedup, f"{row.efficiency:.0%}"])
    head = ["processes", "ms per step", "samples/s", "speed-up", "90 % interval", "efficiency"]
    parts = [
        f"{processes} on {threads}: {shlex.join(result.command_line)}",
        f"1 process: {shlex.join(result.single_command_line)}",
        f"medians of {counted(len(result.rows[0].speedups), 'run')} each, in random order; "
        f"the first {SKIPPED} steps of a run do not count",
        table(head, rows),
        fill(kind_of(result), 96),
    ]
    return "\n\n".join([*parts, *(f"**{finding.text}**" for finding in result.findings)])


def kind_of(result: OwnScalingResult) -> str:
    """Return a sentence about the batches: is this weak or strong scaling?"""
    alone, together = (row.samples_per_step for row in result.rows)
    count = result.processes
    if not alone or not together:
        return (
            "The loaders do not say how many samples a step has. The table assumes weak scaling: "
            f"a step has {count} times as many in {count} processes, because each keeps its batch."
        )
    batches = f"a step has {together:,} samples in {count} processes, and {alone:,} in one."
    if abs(together / (alone * count) - 1) < NEARLY:
        return f"Weak scaling, because each process keeps its batch: {batches}"
    if abs(together / alone - 1) < NEARLY:
        return f"Strong scaling, because the script divides its batch: {batches}"
    return f"Neither weak nor strong scaling: {batches}"


def draw_own(result: OwnScalingResult, path: Path) -> None:
    """Draw the speed-up of the reader's script."""
    figure = new_figure(5, 3.6)
    axis = figure.subplots()
    top = result.processes
    axis.plot([1, top], [1, top], color="0.55", linestyle="--", label="ideal")
    speedups = [row.median_speedup for row in result.rows]
    bars = {"yerr": error_bars(result.rows), "capsize": 3, "label": "your script"}
    axis.errorbar([1, top], speedups, **bars, color=COLORS[0], marker="o", linestyle="none")
    axis.set_xlabel("processes")
    axis.set_ylabel("times as many samples per second\nas one process")
    axis.set_xticks([1, top])
    axis.set_ylim(0, max(top, *result.rows[1].interval, *speedups) * 1.05)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9)
    save(figure, path, load.warning())


def error_bars(rows: list[ScalingRow] | list[GilRow] | list[OwnScalingRow]) -> list[list[float]]:
    """Return the distances from each median down and up to the bounds of its interval.

    They are NaN, which draws nothing, if a row has too few repeats, or is the reference.
    """
    bars = []
    for row in rows:
        low, high = row.interval or [row.median_speedup] * 2
        is_drawn = low < high
        bars.append((row.median_speedup - low, high - row.median_speedup) if is_drawn else NOTHING)
    below, above = map(list, zip(*bars, strict=True))
    return [below, above]
