"""What `accel-demo memory` found, as a table and as bars."""

from pathlib import Path

from accel_demo import show
from accel_demo.lab.memory.formula import KINDS, formula_of

MEGABYTE = 1e6  # bytes
HEAD = ["strategy", "where", "kind", "formula", "predicted", "counted", "measured", "error"]


def text(found: dict) -> str:
    """A row for each kind at each place, in megabytes (10^6 bytes), and what is left out."""
    rows = []
    for place in found["places"]:
        start = [place["strategy"], place["place"]]
        predicted, counted, measured = (
            place[column] for column in ("predicted", "counted", "measured")
        )
        for kind in KINDS:
            if predicted[kind]:
                formula = formula_of(place["strategy"], kind, found["optimizer"])
                error = place["relative_error"].get(kind)
                rows.append(
                    [
                        *(*start, kind, formula, _megabytes(predicted[kind])),
                        _megabytes(counted[kind]) if kind in counted else "–",
                        _megabytes(measured[kind]),
                        "–" if error is None else f"{error:+.1%}",
                    ]
                )
        sums = [sum(sizes[kind] for kind in KINDS) for sizes in (predicted, measured)]
        error = f"{sums[0] / sums[1] - 1:+.1%}" if sums[1] > 0 else "–"  # too small to be seen
        rows.append([*start, "together", "", _megabytes(sums[0]), "", _megabytes(sums[1]), error])
    devices = found["places"][0]["predicted_of_each_device"]
    each = [f"device {i} {_megabytes(sum(one.values()))}" for i, one in enumerate(devices)]
    device = found["places"][-1]["device"]
    what = "the process" if device == "cpu" else "CUDA's allocator"
    connected = found["places"][-1]["connected_processes"]
    lines = [
        f"{found['model']} with {found['optimizer']}: P = {found['parameters']:,} parameters, "
        f"{found['images_per_device']} images per device.",
        f"DDP and FSDP2: {counted(connected, 'connected process')} on {device}. "
        f"Megabytes; measured: {what}.",
        "",
        show.table(HEAD, rows),
        "",
        f"On its devices nn.DataParallel holds, by formula: {', '.join(each)}.",
        "Not all kinds are there at the same moment: activations go as gradients come.",
        "The formulas leave out:",
        *(f"- {line}" for line in found["left_out"]),
    ]
    return "\n".join(lines)


def draw(found: dict, path: Path) -> None:
    """For each place a bar by formula above a measured one, stacked by kind."""
    places = found["places"]
    figure = show.new_figure(9.5, 1.5 + 0.72 * len(places))
    axes = figure.subplots()
    positions, names = [], []
    for index, place in enumerate(places):
        for offset, column in ((-0.2, "predicted"), (0.2, "measured")):
            low = 0.0
            for kind, colour in zip(KINDS, show.COLOURS, strict=False):
                # Without the noise of kinds this strategy does not have.
                size = place[column][kind] / MEGABYTE if place["predicted"][kind] else 0.0
                is_first = index == 0 and column == "predicted"
                style = {"color": colour, "edgecolor": "white", "linewidth": 0.5}
                label = kind if is_first else None
                axes.barh(index + offset, size, 0.36, left=low, label=label, **style)
                low += size
            axes.text(low, index + offset, f" {low:.0f}", va="center", fontsize=8)
            positions.append(index + offset)
            names.append("by formula" if column == "predicted" else "measured")
        where = f"{place['strategy']}\n{place['place']}"
        axes.annotate(
            *(where, (0, index), (-82, 0)),
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=9,
        )
    axes.set_yticks(positions, names, fontsize=8.5)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(places) - 0.5, -0.5)
    axes.margins(x=0.08)
    axes.set_xlabel("megabytes within a step")
    title = (
        f"{found['model']}, {found['optimizer']}, {found['images_per_device']} images per device"
    )
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=8.5)
    show.save(figure, path)


def _megabytes(size: int) -> str:
    return f"{size / MEGABYTE:.2f}"
