"""Draw a picture for each table in tables.py: step, bias and parts."""

import math

from accel_demo import show
from accel_demo.anatomy.data_parallel.scatter_gather import Event
from accel_demo.wording import counted

BLUE, ORANGE, GREEN, _, _, SKY = show.COLOURS[:6]
GREY = "#777777"
BOX_HEIGHT = 0.52
PHASES = ("scatter", "replicate", "parallel_apply", "gather", "backward")


def draw_step(record: list[Event], replicas: int):
    """Draw a column for each replica and a row for each phase. Arrows show where data moves."""
    figure = show.new_figure(2 + 1.75 * max(replicas, 3), 5.6)
    axes = figure.subplots()
    axes.set(xlim=(-1.45, max(replicas, 3) - 0.5), ylim=(5.0, -0.65))
    axes.axis("off")

    def events_of(phase: str, replica: int) -> list[Event]:
        return [event for event in record if (event.phase, event.replica) == (phase, replica)]

    def shape(phase: str, replica: int) -> str:
        return "×".join(map(str, events_of(phase, replica)[0].shapes[0]))

    for row, phase in enumerate(PHASES):
        events = [event for event in record if event.phase == phase]
        threads, size = {event.thread for event in events}, sum(event.size for event in events)
        in_threads = f"{len(threads)} threads" if len(threads) > 1 else f"thread {threads.pop()}"
        axes.text(-1.4, row, phase, va="bottom", weight="bold", fontsize=10)
        axes.text(-1.4, row + 0.05, in_threads, va="top", fontsize=9, color=GREY)
        moved = f"{size} bytes" if size else "nothing moves"
        axes.text(-1.4, row + 0.25, moved, va="top", fontsize=9, color=GREY)
    for replica in range(replicas):
        axes.text(replica, -0.5, f"replica {replica}", ha="center", weight="bold", fontsize=10)
        part, tensors = shape("scatter", replica), len(events_of("replicate", replica)[0].shapes)
        gradients = f"{len(events_of('backward', replica))} gradients"
        call = f"{part} → {shape('parallel_apply', replica)}\nthread “replica {replica}”"
        if replica == 0:
            module, outputs = "the module", "all outputs,\nthen the loss"
            gradients += ", and\nthe sum of all"
        else:
            module, outputs = "a copy", f"{shape('gather', replica)} of the output"
            gradients += "\nof its copy"
        _box(axes, replica, 0, f"{part}\nof the batch", SKY)
        _box(axes, replica, 1, f"{module}\n{tensors} tensors", SKY)
        _box(axes, replica, 2, call, ORANGE)
        _box(axes, replica, 3, outputs, SKY)
        _box(axes, replica, 4, gradients, GREEN)
    for row, leaves_replica_0 in ((0, True), (1, True), (3, False), (4, False)):
        _arrows(axes, row, replicas, leaves_replica_0)
    text = "The optimizer updates only replica 0. The next forward copies the module again."
    axes.text(-1.4, 4.85, text, fontsize=10)
    return figure


def _box(axes, column: int, row: int, text: str, colour: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    corner = (column - 0.42, row - BOX_HEIGHT / 2)
    style = "round,pad=0,rounding_size=0.08"
    options = {"boxstyle": style, "facecolor": colour, "alpha": 0.35, "edgecolor": "none"}
    axes.add_patch(FancyBboxPatch(corner, 0.84, BOX_HEIGHT, **options))
    axes.text(column, row, text, ha="center", va="center", fontsize=9)


def _arrows(axes, row: int, replicas: int, leaves_replica_0: bool) -> None:
    """Draw arrows between replica 0 and every other replica, above a row of boxes."""
    top, line = row - BOX_HEIGHT / 2, row - BOX_HEIGHT / 2 - 0.14
    if replicas == 1:
        return
    axes.plot([0, replicas - 1], [line, line], color=GREY, linewidth=1.2)
    for column in range(replicas):
        axes.plot([column, column], [line, top], color=GREY, linewidth=1.2)
        if (column > 0) == leaves_replica_0:
            arrow = {"arrowstyle": "-|>", "color": GREY, "linewidth": 1.2}
            axes.annotate("", (column, top + 0.02), (column, line), arrowprops=arrow)


def draw_bias(weights: list[float], sizes: list[int], errors: dict[str, list[float]]):
    """Draw the weight of each sample in a plain mean of the chunk means, and the gradient errors.

    `sizes` are the chunk sizes. For each way to compute the loss, `errors` lists the errors of the
    gradient with 1, 2, … replicas.
    """
    figure = show.new_figure(6.2, 7.6)
    upper, lower = figure.subplots(2, 1)
    styles = {sizes[-1]: (ORANGE, f"in one of {sizes[-1]}")}
    styles[sizes[0]] = (BLUE, f"in a chunk of {sizes[0]}")
    start = 0
    for chunk, size in enumerate(sizes):
        colour, label = styles[size]
        samples, shade = range(start, start + size), 0.95 if chunk % 2 else 0.65
        name = label if chunk == sizes.index(size) else None
        upper.bar(samples, weights[start : start + size], color=colour, alpha=shade, label=name)
        start += size
    upper.axhline(1 / len(weights), color="black", linestyle="--", label=f"right: 1/{len(weights)}")
    upper.set(
        xlabel="sample", ylabel="its weight in a plain mean of means", ylim=(0, 1.55 * max(weights))
    )
    most_replicas = len(next(iter(errors.values())))
    used = f", {len(sizes)} used" if len(sizes) < most_replicas else ""
    upper.set_title(f"{len(weights)} samples over {counted(most_replicas, 'replica')}{used}")
    upper.legend(loc="upper left", frameon=False)
    replicas = range(1, most_replicas + 1)
    marks = zip(errors.items(), ("s", "o", "x"), (GREEN, ORANGE, BLUE), strict=True)
    for (name, values), mark, colour in marks:
        filled = {"markerfacecolor": "none"} if mark == "s" else {}
        floor = [max(value, 1e-9) for value in values]
        lower.plot(replicas, floor, mark, color=colour, markersize=9, label=name, **filled)
    for place, value in enumerate(errors["inside, plain mean"], start=1):
        if value > 1e-6:
            # Rotate the text, so that neighboring numbers do not overlap.
            options = {"ha": "center", "va": "bottom", "rotation": 90}
            text, above = f"{value:.3f}", (0, 7)
            lower.annotate(text, (place, value), above, textcoords="offset points", **options)
    lower.axhline(1e-6, color="black", linestyle="--", linewidth=1)
    lower.set(yscale="log", ylim=(3e-10, 1e7), xlabel="replicas", xticks=list(replicas))
    lower.set_yticks([1e-9, 1e-6, 1e-3], ["exact", "rounding: 1e-6", "1e-3"])
    lower.minorticks_off()
    lower.set_ylabel("largest error (logarithmic)")
    lower.set_title(f"gradient of {len(weights)} samples")
    lower.legend(loc="upper left", frameon=False, title="where the loss is", ncols=1, fontsize=9)
    return figure


def draw_parts(moved: dict[str, dict[str, int]]):
    """Draw how many bytes one forward sends from or to the first device in each phase.

    The bytes are points and not bars, because the length of a bar on a logarithmic axis means
    nothing.
    """
    figure = show.new_figure(8, 3.2)
    axes = figure.subplots()
    phases = list(next(iter(moved.values())))
    for index, (name, sizes) in enumerate(moved.items()):
        places = [place + 0.36 * index for place in range(len(phases))]
        colour, marker = ((BLUE, "o"), (ORANGE, "s"))[index]
        axes.plot(list(sizes.values()), places, marker, color=colour, markersize=8, label=name)
        for size, place in zip(sizes.values(), places, strict=True):
            # With one replica, nothing moves, and a logarithmic axis has no place for 0.
            axes.annotate(f"{size:,}", (max(size, 10), place), (8, -4), textcoords="offset points")
    axes.set_yticks([place + 0.18 for place in range(len(phases))], phases)
    axes.set_ylim(len(phases) - 0.4, -0.4)
    most = max(100, *(max(sizes.values()) for sizes in moved.values()))
    axes.set_xlim(10, 10 ** (math.log10(most) * 1.25))
    axes.set_xscale("log")
    axes.set_xlabel("bytes in one forward (logarithmic)")
    axes.grid(axis="x", color="0.9")
    axes.legend(title="wrapped", loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
