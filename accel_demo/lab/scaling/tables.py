"""What `accel-demo scaling` found, as tables and sentences to print."""

import statistics
from pathlib import Path

from accel_demo.anatomy.gil import PARTS
from accel_demo.lab.scaling.fit import amdahl, gustafson
from accel_demo.show import COLOURS, new_figure, save, table
from accel_demo.wording import counted

SCALINGS = ("strong", "weak")
STYLES = {  # colour, marker, and how far beside its count, so that no two cover each other
    "plain PyTorch": (COLOURS[7], "D", -0.05),
    "raw DDP": (COLOURS[0], "o", 0.0),
    "Accelerate": (COLOURS[1], "s", 0.05),
}
TITLES = {
    "strong": "Strong scaling: global batch {batch_size}",
    "weak": "Weak scaling: {batch_size} images per process",
}


def text(found: dict) -> str:
    """The tables and what they say, to print."""
    where = "a GPU each" if found["device"] == "cuda" else f"{threads_text(found['threads'])} each"
    counts = ", ".join(map(str, found["processes"]))
    counts += " connected process" if counts == "1" else " connected processes"
    repeats = counted(found["repeats"], "repeat")
    parts = [
        f"{found['model']} on {found['device']}, {where}; {counts}; medians of {repeats} in turns"
    ]
    for scaling in SCALINGS:
        of = "the global batch" if scaling == "strong" else "the batch per process"
        parts.append(f"{scaling.capitalize()} scaling: {of} is {found['batch_size']} images.")
        parts.append(scaling_table([row for row in found["rows"] if row["scaling"] == scaling]))
    if found["fits"]:
        parts += [fits_table(found["fits"]), what_the_fit_can_tell(found)]
    if shared := cores_shared(found):
        parts.append(shared)
    parts.append(gil_table(found["gil"]))
    return "\n\n".join(parts)


def scaling_table(rows: list[dict]) -> str:
    head = ["telling", "processes", "batch", "images/s", "min – max", "speed-up", "90 % interval"]
    cells = []
    for row in rows:
        rates = row["images_per_second"]
        cells.append(
            [
                row["telling"],
                row["processes"],
                f"{row['processes']} × {row['batch_size']}",
                f"{statistics.median(rates):,.0f}",
                f"{min(rates):,.0f} – {max(rates):,.0f}",
                f"{row['speedup']:.2f}",
                interval_text(row["interval"]),
                f"{row['efficiency']:.0%}",
            ]
        )
    return table([*head, "efficiency"], cells)


def fits_table(fits: list[dict]) -> str:
    head = ["fit", "telling", "serial share", "90 % interval", "farthest from a median"]
    rows = [
        [
            f"{one['law'].capitalize()}, {one['scaling']} scaling",
            one["telling"],
            f"{one['serial_share']:.3f}",
            interval_text(one["interval"], digits=3),
            "one point: no check" if one["misfit"] is None else f"{one['misfit']:.0%}",
        ]
        for one in fits
    ]
    return table(head, rows)


def interval_text(interval: list[float], digits: int = 2) -> str:
    return " – ".join(f"{bound:.{digits}f}" for bound in interval) or "needs 5 repeats"


def what_the_fit_can_tell(found: dict) -> str:
    """In words: what so many process counts say about the law, and what they do not."""
    several = [count for count in found["processes"] if count > 1]
    said = "The serial share is relative to the same telling in one process."
    if len(several) == 1:
        said += (
            f" With 1 and {several[0]} processes there is one speed-up to fit, and each law has a "
            "share for any speed-up. So it sums up what was lost, but it cannot show that the law "
            "holds, nor promise anything for more processes."
        )
    if any(one["serial_share"] > 1 for one in found["fits"]):
        said += " Above 1: slower than one process, and no serial share explains that."
    if any(one["serial_share"] < 0 for one in found["fits"]):
        said += " Below 0: faster than the ideal, and no serial share explains that."
    if any(not 0 <= one["serial_share"] <= 1 for one in found["fits"]):
        said += " Noise can do it too: look whether the interval goes beyond 0 to 1 as a whole."
    return said


def cores_shared(found: dict) -> str:
    """In words: which counts have fewer cores than threads, or nothing. GPUs are not shared."""
    cores, threads = found["cores"], found["threads"]
    crowded = [count for count in found["processes"] if count * threads > cores]
    if found["device"] == "cuda" or not crowded:
        return ""
    counts = " and ".join(map(str, crowded)) + (" process" if crowded == [1] else " processes")
    each = f"{threads_text(threads)} each"
    return (
        f"{counts} with {each} share {counted(cores, 'core')}: the "
        "threads take turns there, so do not expect more speed from more of them."
    )


def threads_text(threads: int) -> str:
    return counted(threads, "thread")


def gil_table(found: dict) -> str:
    head = ["work, in two parts", "way", "times as fast", "cores busy"]
    rows = [
        [kind, way, f"{one['speedup']:.2f}", f"{one['cores_busy']:.2f}"]
        for kind, ways in found["work"].items()
        for way, one in ways.items()
    ]
    lock = "has the global interpreter lock" if found["has_gil"] else "has no interpreter lock"
    return f"{table(head, rows)}\n\nThis Python {lock}."


def draw(found: dict, path: Path) -> None:
    """Two panels of speed-ups with their spread and fit, one of threads against processes."""
    figure = new_figure(12, 4.6)
    strong, weak, threads = figure.subplots(1, 3, width_ratios=(1, 1, 1.1))
    for scaling, axis in (("strong", strong), ("weak", weak)):
        draw_scaling(axis, found, scaling)
    strong.set_ylabel("times as fast as plain PyTorch\nin one process")
    draw_gil(threads, found["gil"]["work"])
    save(figure, path)


def draw_scaling(axis, found: dict, scaling: str) -> None:
    counts, cores = found["processes"], found["cores"] / found["threads"]
    top = counts[-1]
    axis.plot([1, max(2, top)], [1, max(2, top)], color="0.55", linestyle="--", label="ideal")
    if found["device"] == "cpu" and top > cores:
        axis.axvspan(max(1, cores), top + 0.25, color="0.93", label="cores are shared")
    rows = [row for row in found["rows"] if row["scaling"] == scaling]
    start = {row["telling"]: row["speedup"] for row in rows if row["processes"] == 1}
    for fit in found["fits"]:
        if fit["scaling"] == scaling:
            law = amdahl if fit["law"] == "amdahl" else gustafson
            line = [1 + (top - 1) * step / 50 for step in range(51)]
            heights = [start[fit["telling"]] * law(fit["serial_share"], count) for count in line]
            label = f"{fit['law'].capitalize()}, share {fit['serial_share']:.2f}"
            colour = STYLES[fit["telling"]][0]
            axis.plot(line, heights, color=colour, linewidth=1.2, label=label)
    for telling, (colour, marker, offset) in STYLES.items():
        own = [row for row in rows if row["telling"] == telling]
        medians = [row["speedup"] for row in own]
        below = [row["speedup"] - min(row["speedups"]) for row in own]
        above = [max(row["speedups"]) - row["speedup"] for row in own]
        axis.errorbar(
            [row["processes"] + offset * max(1, top - 1) for row in own],
            medians,
            yerr=[below, above],
            color=colour,
            marker=marker,
            markersize=6,
            linestyle="none",
            capsize=3,
            label=telling,
        )
    axis.set_title(TITLES[scaling].format(**found), fontsize=10)
    axis.set_xlabel("processes")
    axis.set_xticks(counts)
    highest = max(max(row["speedups"]) for row in rows)
    axis.set_ylim(0, max(2, top, highest) * 1.05)
    axis.spines[["top", "right"]].set_visible(False)
    put_legend_below(axis)


def draw_gil(axis, work: dict[str, dict[str, dict]]) -> None:
    """A group of bars for each kind of work, with the lowest and the highest of the repeats."""
    ways = list(next(iter(work.values())))
    for index, way in enumerate(ways):
        places = [place + (index - 1) * 0.27 for place in range(len(work))]
        found = [kinds[way] for kinds in work.values()]
        heights = [one["speedup"] for one in found]
        below = [one["speedup"] - min(one["speedups"]) for one in found]
        above = [max(one["speedups"]) - one["speedup"] for one in found]
        axis.bar(places, heights, 0.25, color=COLOURS[index], label=way)
        axis.errorbar(places, heights, yerr=[below, above], color="black", fmt="none", capsize=3)
    axis.axhline(PARTS, color="0.55", linewidth=1, linestyle="--")
    axis.set_xticks(range(len(work)), [kind.replace(" in ", "\nin ") for kind in work])
    axis.set_ylabel("times as fast as\none after the other")
    axis.set_title("Work in two parts: the lock of Python", fontsize=10)
    highest = max(max(one["speedups"]) for kinds in work.values() for one in kinds.values())
    axis.set_ylim(0, max(PARTS, highest) * 1.1)
    axis.spines[["top", "right"]].set_visible(False)
    put_legend_below(axis)


def put_legend_below(axis) -> None:
    """Where it can cover no point."""
    axis.legend(frameon=False, fontsize=9, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2))
