"""Print and draw the result of `accel-demo parity`."""

import textwrap
from pathlib import Path

from accel_demo import show
from accel_demo.lab import load
from accel_demo.lab.parity.own import OwnParityResult
from accel_demo.lab.parity.pairs import BOUND, NOTHING, SAME_BITS, ParityResult, ParityRow
from accel_demo.wording import counted

HEAD = ["runs", "connected processes", "weights differ by", "bitwise", "promised", "kept"]


def text(result: ParityResult) -> str:
    """Return the table, the reasons for the differences, and the number of broken promises."""
    reasons = list(dict.fromkeys(row.why for row in result.rows if row.why))
    cells = []
    for row in result.rows:
        difference, bitwise = row.difference, "yes"
        if row.why:
            bitwise = "only the weights" if difference.same_weights else "no"
            bitwise += f" ({reasons.index(row.why) + 1})"
        kept = "–" if row.promised == NOTHING else "yes" if row.keeps_promise else "NO"
        weights = f"{difference.weights:.1e}"
        cells.append([row.pair, _processes(row), weights, bitwise, row.promised, kept])
    notes = "".join(f"\n({number}) {why}" for number, why in enumerate(reasons, start=1))
    promised = [row for row in result.rows if row.promised != NOTHING]
    broken = [row.pair for row in promised if not row.keeps_promise]
    verdict = f"All {len(promised)} promises are kept."
    if broken:
        verdict = f"{len(broken)} of {len(promised)} promises are broken: {'; '.join(broken)}."
    return f"{_title(result)}\n\n{show.table(HEAD, cells)}\n{notes}\n\n{verdict}"


def draw_own(result: OwnParityResult, path: Path) -> None:
    """Draw how much the gradients and the weights of a script differ in each step."""
    figure = show.new_figure(8, 3.6)
    axes = figure.subplots()
    steps = [row.step for row in result.steps]
    for name, values, color in (
        ("gradients, relative to their size", [row.gradients for row in result.steps], 0),
        ("weights, relative to how far they have moved", [row.weights for row in result.steps], 1),
    ):
        shown = [min(max(value, 1e-9), 1e3) for value in values]
        axes.plot(steps, shown, "o-", color=show.COLORS[color], label=name)
    if result.first_step:
        axes.axvline(result.first_step, color=show.COLORS[3], linestyle="--", label="differs first")
    axes.set_yscale("log")
    axes.set(xlabel="optimizer step", ylabel="difference")
    axes.set_xticks(steps)
    axes.set_title(textwrap.fill(result.text, 90), fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8.5)
    show.save(figure, path, load.warning())


def draw(result: ParityResult, path: Path) -> None:
    """Draw one row for each pair of runs: the largest weight difference and the promised limit."""
    rows = result.rows
    blue, orange, black = show.COLORS[0], show.COLORS[3], show.COLORS[7]
    left, zero, no_longer_zero, right = 3e-11, 1e-10, 4e-10, 1e4
    figure = show.new_figure(9.5, 1.8 + 0.42 * len(rows))
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.axvspan(left, no_longer_zero, color="#e8e8e8", zorder=0)
    for line, row in enumerate(rows):
        if row.difference.statistics:
            style = {"marker": "^", "s": 38, "facecolor": "white", "edgecolor": black, "zorder": 3}
            x = min(max(1e-9, row.difference.statistics), 10)
            axes.scatter(x, line, label="running statistics of BatchNorm", **style)
        weights = row.difference.weights
        x = min(max(1e-9, weights), 10) if weights else zero
        color, marker, label = blue, "o", "weights"
        if not row.keeps_promise:
            color, marker, label = orange, "X", "weights (promise broken)"
        axes.scatter(x, line, s=60, zorder=4, color=color, marker=marker, label=label)
        if row.promised == NOTHING:
            axes.text(right / 2, line, "nothing promised", ha="right", va="center", fontsize=8)
            continue
        limit = no_longer_zero if row.promised == SAME_BITS else BOUND
        style = {"color": black, "linewidth": 2, "label": "promised limit"}
        axes.plot([limit] * 2, [line - 0.32, line + 0.32], **style)
    names = [f"{row.pair}  [{_processes(row)}]" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8.5)
    axes.set(xlim=(left, right), ylim=(len(rows) - 0.4, -0.6))
    ticks = [10.0**power for power in (-8, -6, -4, -2, 0)]
    labels = ["the same\nbits", *(f"$10^{{{power}}}$" for power in (-8, -6, -4, -2)), "1"]
    axes.set_xticks([zero, *ticks], labels)
    axes.minorticks_off()
    x_label = "largest difference between values in the two saved files"
    axes.set(xlabel=x_label, ylabel="runs  [connected processes]")
    axes.set_title(_title(result), fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    place = {"loc": "outside lower center", "ncols": 2, "frameon": False, "fontsize": 8.5}
    figure.legend(unique.values(), unique.keys(), **place)
    show.save(figure, path)


def _processes(row: ParityRow) -> str:
    return " and ".join(map(str, row.connected_processes))


def _title(result: ParityResult) -> str:
    config = result.config
    return (
        f"{config.model}, {config.optimizer}, {counted(config.max_steps, 'step')} with "
        f"{config.batch_size} {config.sample}s per process, on {result.device}"
    )
