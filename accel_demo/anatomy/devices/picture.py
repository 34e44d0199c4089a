"""Draw how CUDA_VISIBLE_DEVICES renumbers the GPUs: the picture of `devices --visible`."""

import re
from pathlib import Path

from accel_demo import show
from accel_demo.anatomy.devices.gpus import visible_devices
from accel_demo.errors import UserError

# One unit of x is a GPU of the machine; two are an id, whose words have to fit in.
INCHES = 0.75  # per unit
UNITS_PER_LETTER = 0.12  # what a digit takes at 10 pt, the widest that an id has


def check_drawable(value: str) -> None:
    """Raise `UserError` for a value of CUDA_VISIBLE_DEVICES that `draw_map` cannot show."""
    ids = _ids(value)
    if not all(re.fullmatch(r"\s*[+-]?[0-9]+\s*", written) for written in ids):
        raise UserError(f"--plot draws numbers only, got {value!r}")
    if len(set(map(int, ids))) < len(ids):
        raise UserError("--plot draws numbers that come once: leave out what comes twice")
    if len(ids) > 16:
        raise UserError(f"--plot draws up to 16 ids, got {len(ids)}")


def draw_map(values: list[str], physical: int, file: Path) -> None:
    """For each value: the machine's GPUs, the ids as written, PyTorch's devices."""
    left = min(-2.7, *(0.1 - UNITS_PER_LETTER * len(f"= {value}") for value in values))
    right = max(physical - 0.4, 1.5, *(2 * len(_ids(value)) - 0.1 for value in values))
    figure = show.new_figure(INCHES * (right - left), 2.5 * len(values))
    for row, value in enumerate(values, start=1):
        axes = figure.add_subplot(len(values), 1, row, xlim=(left, right), ylim=(-0.45, 2.45))
        _draw_one_map(axes, left, value, physical)
    show.save(figure, file)


def _draw_one_map(axes, left: float, value: str, physical: int) -> None:
    found, written = visible_devices(value, physical), _ids(value)
    colours, red, grey = [show.COLOURS[0], show.COLOURS[2], show.COLOURS[4]], "#d55e00", "#707070"
    places = {gpu: place for place, gpu in enumerate(found.values())}
    axes.axis("off")
    shown = value if written else "(empty)"
    levels = ["PyTorch's devices", f"CUDA_VISIBLE_DEVICES\n= {shown}", "the machine's GPUs"]
    for y, level in enumerate(levels):
        axes.text(left, y, level, va="center", fontsize=10)

    def box(x: int, y: int, text: str, colour: str) -> None:
        frame = {"boxstyle": "round,pad=0.4", "facecolor": "white", "edgecolor": colour}
        axes.text(x, y, text, ha="center", va="center", color=colour, fontsize=10, bbox=frame)

    for gpu in range(physical):
        box(gpu, 2, f"GPU {gpu}", colours[places[gpu] % 3] if gpu in places else grey)
    for place, word in enumerate(written):
        x = 1 + 2 * place
        if place < len(found):
            gpu, colour = found[f"cuda:{place}"], colours[place % 3]
            axes.plot([gpu, gpu, x, x], [2, 1.8, 1.2, 0], color=colour, zorder=0)
            box(x, 0, f"cuda:{place}", colour)
        else:
            colour = red if place == len(found) else grey
            says = f"no GPU for {word}" if place == len(found) else "so this is hidden"
            axes.text(x, 0.5, says, ha="center", color=colour, fontsize=10)
        box(x, 1, word, colour)
    if not written:
        axes.text(0, 0, "none visible", va="center", color=red, fontsize=10)


def _ids(value: str) -> list[str]:
    return value.split(",") if value.strip() else []
