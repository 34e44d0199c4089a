"""What `accel-demo parity` found, as a table to print or as Markdown."""

from pathlib import Path

from accel_demo import show
from accel_demo.lab import machine
from accel_demo.lab.parity.ledger import NOTHING, SAME_BITS, has_kept_its_promise
from accel_demo.wording import counted

HEAD = ["runs", "connected processes", "weights differ by", "bitwise", "promised", "kept"]


def text(found: dict) -> str:
    """The table, and below it a line for each reason, to read in a terminal."""
    rows = found["rows"]
    reasons = list(dict.fromkeys(row["why"] for row in rows if row["why"]))
    cells = []
    for row in rows:
        number = f" ({reasons.index(row['why']) + 1})" if row["why"] else ""
        cells.append(_cells(row, bitwise=_bitwise(row) + number))
    notes = "".join(f"\n({number}) {why}" for number, why in enumerate(reasons, start=1))
    return f"{_what(found)}\n\n{show.table(HEAD, cells)}\n{notes}\n\n{_verdict(rows)}"


def markdown(found: dict) -> str:
    """The same as a Markdown table with the reasons in it, and a line on the machine."""
    cells = [[*_cells(row, _bitwise(row)), row["why"]] for row in found["rows"]]
    table = show.table([*HEAD, "why not"], cells)
    environment = machine.environment()
    place = environment["gpu"] if found["device"] != "cpu" else environment["cpu"]
    versions = ", ".join(
        f"{name} {environment[name]}" for name in ("python", "torch", "accelerate")
    )
    last = f"Measured on {place or 'an unknown CPU'} ({environment['platform']}): {versions}."
    return f"{_what(found)}\n\n{table}\n\n{_verdict(found['rows'])}\n{last}"


def draw(found: dict, path: Path) -> None:
    """A line for each pair: how far apart its weights are, and how far they may be."""
    rows = found["rows"]
    blue, orange, black = show.COLOURS[0], show.COLOURS[3], show.COLOURS[7]
    left, zero, no_longer_zero, right = 3e-11, 1e-10, 4e-10, 1e4
    figure = show.new_figure(9.5, 1.8 + 0.42 * len(rows))
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.axvspan(left, no_longer_zero, color="#e8e8e8", zorder=0)
    for line, row in enumerate(rows):
        if row["statistics_differ_by"]:
            style = {"marker": "^", "s": 38, "facecolor": "white", "edgecolor": black, "zorder": 3}
            x = min(max(1e-9, row["statistics_differ_by"]), 10)
            axes.scatter(x, line, label="running statistics of BatchNorm", **style)
        difference = row["weights_differ_by"]
        x = min(max(1e-9, difference), 10) if difference else zero
        if has_kept_its_promise(row):
            axes.scatter(x, line, s=60, color=blue, zorder=4, label="weights")
        else:
            style = {"marker": "X", "s": 60, "color": orange, "zorder": 4}
            axes.scatter(x, line, label="weights, a broken promise", **style)
        if row["promised"] == NOTHING:
            axes.text(right / 2, line, "nothing promised", ha="right", va="center", fontsize=8)
            continue
        furthest = no_longer_zero if row["promised"] == SAME_BITS else row["promised"]
        style = {"color": black, "linewidth": 2, "label": "promised: no further to the right"}
        axes.plot([furthest] * 2, [line - 0.32, line + 0.32], **style)
    names = [f"{row['pair']}  [{_processes(row)}]" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8.5)
    axes.set(xlim=(left, right), ylim=(len(rows) - 0.4, -0.6))
    ticks = [10.0**power for power in (-8, -6, -4, -2, 0)]
    labels = ["the same\nbits", *(f"$10^{{{power}}}$" for power in (-8, -6, -4, -2)), "1"]
    axes.set_xticks([zero, *ticks], labels)
    axes.minorticks_off()
    axes.set_xlabel("largest difference of a number in the two saved files")
    axes.set_ylabel("runs  [connected processes]")
    axes.set_title(_what(found), fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    place = {"loc": "outside lower center", "ncols": 2, "frameon": False, "fontsize": 8.5}
    figure.legend(once.values(), once.keys(), **place)
    show.save(figure, path)


def _cells(row: dict, bitwise: str) -> list[str]:
    promised = row["promised"]
    kept = "–" if promised == NOTHING else "yes" if has_kept_its_promise(row) else "NO"
    within = promised if isinstance(promised, str) else f"within {promised:g}"
    return [row["pair"], _processes(row), f"{row['weights_differ_by']:.1e}", bitwise, within, kept]


def _bitwise(row: dict) -> str:
    return "yes" if row["same_file"] else "weights alone" if row["same_weights"] else "no"


def _processes(row: dict) -> str:
    return " and ".join(map(str, row["connected_processes"]))


def _what(found: dict) -> str:
    steps = counted(found["max_steps"], "step")
    images = f"{found['batch_size']} images per process"
    return f"{found['model']}, {found['optimizer']}, {steps} with {images}, on {found['device']}"


def _verdict(rows: list[dict]) -> str:
    promised = [row for row in rows if row["promised"] != NOTHING]
    broken = [row["pair"] for row in promised if not has_kept_its_promise(row)]
    if broken:
        return f"{len(broken)} of {len(promised)} promises broken: {'; '.join(broken)}."
    return f"All {len(promised)} promises are kept."
