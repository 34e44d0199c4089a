"""Draw what `accel-demo scaling` found: speed-ups below the ideal line, and threads' lock."""

from pathlib import Path

from accel_demo.anatomy.gil import PARTS
from accel_demo.lab.scaling.fit import amdahl, gustafson
from accel_demo.show import COLOURS, new_figure, save

STYLES = {  # colour, marker, and how far beside its count, so that no two cover each other
    "plain PyTorch": (COLOURS[7], "D", -0.05),
    "raw DDP": (COLOURS[0], "o", 0.0),
    "Accelerate": (COLOURS[1], "s", 0.05),
}
TITLES = {
    "strong": "Strong scaling: global batch {batch_size}",
    "weak": "Weak scaling: {batch_size} images per process",
}


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
