"""The pictures of tables.py: the phases of a step, the bias, VGG in two parts."""

import math

from accel_demo import show
from accel_demo.anatomy.data_parallel.scatter_gather import Event
from accel_demo.wording import counted

BLUE, ORANGE, GREEN, RED, PINK, SKY = show.COLOURS[:6]
GREY, HEIGHT = "#777777", 0.52  # of a box


def draw_step(record: list[Event], replicas: int):
    """One lane for each replica, time running down; arrows are what moves."""
    figure = show.new_figure(2 + 1.75 * max(replicas, 3), 5.6)
    axes = figure.subplots()
    axes.set(xlim=(-1.45, max(replicas, 3) - 0.5), ylim=(5.0, -0.65))
    axes.axis("off")

    def of(phase: str, replica: int) -> list[Event]:
        return [event for event in record if (event.phase, event.replica) == (phase, replica)]

    def shape(phase: str, replica: int) -> str:
        return "×".join(map(str, of(phase, replica)[0].shapes[0]))

    def size(phase: str) -> int:
        return sum(event.size for event in record if event.phase == phase)

    for replica in range(replicas):
        axes.text(replica, -0.5, f"replica {replica}", ha="center", weight="bold", fontsize=10)
    for row, phase in enumerate(("scatter", "replicate", "parallel_apply", "gather", "backward")):
        threads = {event.thread for event in record if event.phase == phase}
        where = f"{len(threads)} threads" if len(threads) > 1 else f"thread {threads.pop()}"
        axes.text(-1.4, row, phase, va="bottom", weight="bold", fontsize=10)
        axes.text(-1.4, row + 0.05, where, va="top", fontsize=9, color=GREY)
        moved = f"{size(phase)} bytes" if size(phase) else "nothing moves"
        axes.text(-1.4, row + 0.25, moved, va="top", fontsize=9, color=GREY)
    for replica in range(replicas):
        tensors = len(of("replicate", replica)[0].shapes)
        first = replica == 0
        part = shape("scatter", replica)
        gradients = f"{len(of('backward', replica))} gradients"
        outputs = f"{shape('gather', replica)} of the output"
        _box(axes, replica, 0, f"{part}\nof the batch", SKY)
        _box(axes, replica, 1, f"{'the module' if first else 'a copy'}\n{tensors} tensors", SKY)
        does = f"{part} → {shape('parallel_apply', replica)}\nthread “replica {replica}”"
        _box(axes, replica, 2, does, ORANGE)
        _box(axes, replica, 3, "all outputs,\nthen the loss" if first else outputs, SKY)
        _box(
            axes,
            replica,
            4,
            f"{gradients}{', and' if first else ''}\n"
            f"{'the sum of all' if first else 'of its copy'}",
            GREEN,
        )
    for row, leaves_the_first in ((0, True), (1, True), (3, False), (4, False)):
        _arrows(axes, row, replicas, leaves_the_first)
    text = "The optimizer steps on replica 0 alone. The next forward copies the module anew."
    axes.text(-1.4, 4.85, text, fontsize=10)
    return figure


def _box(axes, lane: int, row: int, text: str, colour: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    corner = (lane - 0.42, row - HEIGHT / 2)
    style = "round,pad=0,rounding_size=0.08"
    options = {"boxstyle": style, "facecolor": colour, "alpha": 0.35, "edgecolor": "none"}
    axes.add_patch(FancyBboxPatch(corner, 0.84, HEIGHT, **options))
    axes.text(lane, row, text, ha="center", va="center", fontsize=9)


def _arrows(axes, row: int, replicas: int, leaves_the_first: bool) -> None:
    """Between the box of replica 0 and each other's, over the boxes of the row."""
    top, line = row - HEIGHT / 2, row - HEIGHT / 2 - 0.14
    if replicas == 1:
        return
    axes.plot([0, replicas - 1], [line, line], color=GREY, linewidth=1.2)
    for lane in range(replicas):
        axes.plot([lane, lane], [line, top], color=GREY, linewidth=1.2)
        if (lane > 0) == leaves_the_first:
            arrow = {"arrowstyle": "-|>", "color": GREY, "linewidth": 1.2}
            axes.annotate("", (lane, top + 0.02), (lane, line), arrowprops=arrow)


def draw_bias(weights: list[float], sizes: list[int], errors: dict[str, list[float]]):
    """How much each sample counts in a plain mean of means, and how far off gradients are."""
    figure = show.new_figure(9.6, 3.9)
    left, right = figure.subplots(1, 2)
    chunk_of = [chunk for chunk, size in enumerate(sizes) for _ in range(size)]
    odd = [sizes[chunk] != sizes[0] for chunk in chunk_of]
    for is_odd, label in ((False, f"in a chunk of {sizes[0]}"), (True, f"in one of {sizes[-1]}")):
        places = [place for place in range(len(weights)) if odd[place] == is_odd]
        shades = [0.95 if chunk_of[place] % 2 else 0.65 for place in places]
        for place, shade in zip(places, shades, strict=True):
            name = label if place == places[0] else None
            colour = ORANGE if is_odd else BLUE
            left.bar(place, weights[place], color=colour, alpha=shade, label=name)
    left.axhline(1 / len(weights), color="black", linestyle="--", label=f"right: 1/{len(weights)}")
    left.set(
        xlabel="sample", ylabel="its weight in a plain mean of means", ylim=(0, 1.55 * max(weights))
    )
    asked = len(next(iter(errors.values())))
    used = f", {len(sizes)} used" if len(sizes) < asked else ""
    over = f"{counted(asked, 'replica')}{used}"
    left.set_title(f"{len(weights)} samples over {over}")
    left.legend(loc="upper left", frameon=False)
    replicas = range(1, asked + 1)
    marks = zip(errors.items(), ("s", "o", "x"), (GREEN, ORANGE, BLUE), strict=True)
    for (name, values), mark, colour in marks:
        filled = {"markerfacecolor": "none"} if mark == "s" else {}
        floor = [max(value, 1e-9) for value in values]
        right.plot(replicas, floor, mark, color=colour, markersize=9, label=name, **filled)
    for place, value in enumerate(errors["inside, plain mean"], start=1):
        if value > 1e-6:
            right.annotate(
                f"{value:.3f}",
                (place, value),
                (0, 7),
                ha="center",
                va="bottom",
                rotation=90,  # or those of two replicas beside each other overlap
                textcoords="offset points",
            )
    right.axhline(1e-6, color="black", linestyle="--", linewidth=1)
    right.set(yscale="log", ylim=(3e-10, 1e7), xlabel="replicas", xticks=list(replicas))
    right.set_yticks([1e-9, 1e-6, 1e-3], ["exact", "1e-6", "1e-3"])
    right.minorticks_off()
    right.set_title(f"gradient of {len(weights)} samples: largest error")
    right.legend(loc="upper left", frameon=False, title="where the loss is", ncols=1, fontsize=9)
    return figure


def draw_parts(moved: dict[str, dict[str, int]]):
    """Bytes that leave or reach the first device in one forward, by phase."""
    figure = show.new_figure(8, 3.2)
    axes = figure.subplots()
    phases = list(next(iter(moved.values())))
    for index, (name, sizes) in enumerate(moved.items()):
        places = [place + 0.36 * index for place in range(len(phases))]
        bars = axes.barh(
            places, list(sizes.values()), 0.34, color=(BLUE, ORANGE)[index], label=name
        )
        axes.bar_label(bars, [f"{size:,}" for size in sizes.values()], padding=4)
    axes.set_yticks([place + 0.18 for place in range(len(phases))], phases)
    axes.invert_yaxis()
    most = max(100, *(max(sizes.values()) for sizes in moved.values()))
    axes.set_xlim(10, 10 ** (math.log10(most) * 1.25))
    axes.set_xscale("log")  # after the limits: with one replica nothing moves, and all bars are 0
    axes.set_xlabel("bytes in one forward (logarithmic)")
    axes.legend(title="wrapped", loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
