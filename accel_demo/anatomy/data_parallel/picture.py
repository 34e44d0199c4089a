"""Draw a picture for each table in tables.py: step and bias."""

from accel_demo import show
from accel_demo.anatomy.data_parallel.scatter_gather import (
    GATHER_BACKWARD,
    PHASES,
    REPLICATE_BACKWARD,
    Event,
)
from accel_demo.wording import counted

BLUE, ORANGE, GREEN, _, _, SKY = show.COLORS[:6]
GRAY = "#555555"
BOX_HEIGHT = 0.34


def draw_step(record: list[Event], replicas: int):
    """Draw a column for each replica and a row for each phase. Arrows show where data moves."""
    columns = max(replicas, 3)
    figure = show.new_figure(0.4 + 1.45 * columns, 7.7)
    axes = figure.subplots()
    axes.set(xlim=(-0.55, columns - 0.45), ylim=(5.85, -1.0))
    axes.axis("off")

    def events_of(phase: str, replica: int) -> list[Event]:
        return [event for event in record if (event.phase, event.replica) == (phase, replica)]

    def shape(phase: str, replica: int) -> str:
        return "×".join(map(str, events_of(phase, replica)[0].shapes[0]))

    for row, phase in enumerate(PHASES):
        events = [event for event in record if event.phase == phase]
        threads, size = {event.thread for event in events}, sum(event.size for event in events)
        where = f"{len(threads)} threads" if len(threads) > 1 else f"thread {threads.pop()}"
        moved = f"{size} bytes" if size else "nothing moves"
        above = row - 0.42
        axes.text(-0.47, above, phase, weight="bold", fontsize=12)
        axes.text(columns - 0.53, above, f"{where}, {moved}", ha="right", fontsize=12, color=GRAY)
    whole = sum(events_of("gather", replica)[0].shapes[0][0] for replica in range(replicas))
    for replica in range(replicas):
        axes.text(replica, -0.75, f"replica {replica}", ha="center", weight="bold", fontsize=12)
        outputs = shape("gather", replica)
        if replica == 0:
            outputs = f"all: {whole}×{outputs.partition('×')[2]}"
        gradients = f"{len(events_of(REPLICATE_BACKWARD, replica))} gradients"
        _box(axes, replica, 0, shape("scatter", replica), SKY)
        _box(axes, replica, 1, "a copy" if replica else "the module", SKY)
        call = f"{shape('scatter', replica)} → {shape('parallel_apply', replica)}"
        _box(axes, replica, 2, call, ORANGE)
        _box(axes, replica, 3, outputs, SKY)
        _box(axes, replica, 4, shape(GATHER_BACKWARD, replica), GREEN)
        _box(axes, replica, 5, gradients if replica else "their sum", GREEN)
    for row, leaves_replica_0 in ((0, True), (1, True), (3, False), (4, True), (5, False)):
        _arrows(axes, row, replicas, leaves_replica_0)
    text = "The optimizer updates only replica 0.\nThe next forward copies the module again."
    axes.text(-0.47, 5.78, text, fontsize=12)
    return figure


def _box(axes, column: int, row: int, text: str, color: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    corner = (column - 0.46, row - BOX_HEIGHT / 2)
    style = "round,pad=0,rounding_size=0.08"
    options = {"boxstyle": style, "facecolor": color, "alpha": 0.35, "edgecolor": "none"}
    axes.add_patch(FancyBboxPatch(corner, 0.92, BOX_HEIGHT, **options))
    axes.text(column, row, text, ha="center", va="center", fontsize=12)


def _arrows(axes, row: int, replicas: int, leaves_replica_0: bool) -> None:
    """Draw arrows between replica 0 and every other replica, above a row of boxes."""
    top, line = row - BOX_HEIGHT / 2, row - BOX_HEIGHT / 2 - 0.16
    if replicas == 1:
        return
    axes.plot([0, replicas - 1], [line, line], color=GRAY, linewidth=1.4)
    for column in range(replicas):
        axes.plot([column, column], [line, top], color=GRAY, linewidth=1.4)
        if (column > 0) == leaves_replica_0:
            arrow = {"arrowstyle": "-|>", "color": GRAY, "linewidth": 1.4}
            axes.annotate("", (column, top + 0.03), (column, line), arrowprops=arrow)


def draw_bias(weights: list[float], sizes: list[int], errors: dict[str, list[float]]):
    """Draw the weight of each sample in a plain mean of the parts' means, and the gradient errors.

    `sizes` are the numbers of samples in each part. For each way to compute the loss, `errors`
    lists the relative errors of the gradient with 1, 2, … replicas.
    """
    figure = show.new_figure(6.2, 7)
    upper, lower = figure.subplots(2, 1)
    styles = {size: (ORANGE, f"in a part of {size}") for size in sizes}
    styles[sizes[0]] = (BLUE, f"in a part of {sizes[0]}")
    start = 0
    for part, size in enumerate(sizes):
        color, label = styles[size]
        name = label if part == sizes.index(size) else None
        samples = range(start, start + size)
        upper.bar(samples, weights[start : start + size], color=color, label=name)
        start += size
    upper.axhline(1 / len(weights), color="black", linestyle="--", label=f"right: 1/{len(weights)}")
    # The legend fits above the low bars on the left, if there are any.
    room = 1.1 if max(weights) > 1.5 * weights[0] else 1.55
    upper.set(xlabel="sample", ylabel="its weight in a plain\nmean of means")
    upper.set_ylim(0, room * max(weights))
    most_replicas = len(next(iter(errors.values())))
    used = f", {len(sizes)} used" if len(sizes) < most_replicas else ""
    upper.set_title(f"{len(weights)} samples over {counted(most_replicas, 'replica')}{used}")
    upper.legend(loc="upper left", frameon=False, fontsize=11)
    replicas = range(1, most_replicas + 1)
    marks = zip(errors.items(), ("s", "o", "x"), (GREEN, ORANGE, BLUE), strict=True)
    for (name, values), mark, color in marks:
        filled = {"markerfacecolor": "none"} if mark == "s" else {}
        floor = [max(value, 1e-9) for value in values]
        lower.plot(replicas, floor, mark, color=color, markersize=9, label=name, **filled)
    for place, value in enumerate(errors["inside, plain mean"], start=1):
        if value > 1e-6:
            # Rotate the text, so that neighboring numbers do not overlap.
            options = {"ha": "center", "va": "bottom", "rotation": 90}
            text, above = f"{value:.3f}", (0, 7)
            lower.annotate(text, (place, value), above, textcoords="offset points", **options)
    lower.axhline(1e-6, color="black", linestyle="--", linewidth=1)
    lower.set(yscale="log", ylim=(3e-10, 1e2), xlabel="replicas", xticks=list(replicas))
    lower.set_yticks([1e-9, 1e-6, 1e-3], ["1e-9 or less", "rounding: 1e-6", "1e-3"])
    lower.minorticks_off()
    lower.set_ylabel("largest error, relative")
    lower.set_title(f"gradient of {len(weights)} samples")
    below = {"loc": "upper center", "bbox_to_anchor": (0.45, -0.18), "ncols": 3, "fontsize": 9.5}
    lower.legend(frameon=False, title="loss computed", columnspacing=1, handletextpad=0.3, **below)
    return figure
