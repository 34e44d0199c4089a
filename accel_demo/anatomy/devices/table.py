"""The command line of `devices`: what this machine has, or how ids renumber its GPUs."""

import re
from pathlib import Path

from accel_demo import show
from accel_demo.anatomy.command_line import command_line, read
from accel_demo.anatomy.devices import gpus
from accel_demo.anatomy.devices.gpus import visible_devices
from accel_demo.errors import UserError


def print_map(values: list[str], physical: int) -> None:
    """Which GPU each device of PyTorch is, for each value of CUDA_VISIBLE_DEVICES."""
    maps = [gpus.visible_devices(value, physical) for value in values]
    words = [", ".join(f"{name}: {gpu}" for name, gpu in one.items()) for one in maps]
    head = ["CUDA_VISIBLE_DEVICES", "visible", "PyTorch's device: the GPU"]
    print(show.table(head, [list(row) for row in zip(values, map(len, maps), words, strict=True)]))


def main(arguments: list[str] | None = None) -> None:
    parser = command_line(gpus.__doc__)
    help = "a value of CUDA_VISIBLE_DEVICES to explain instead; may come several times"
    parser.add_argument("--visible", metavar="IDS", action="append", help=help)
    help = "how many GPUs the machine is to have, for --visible (default: 8)"
    parser.add_argument("--physical", metavar="N", type=int, default=8, help=help)
    options = read(parser, arguments)
    if options.plot and options.visible is None:
        raise UserError("--plot draws what --visible asks for: name some ids, as in 0,4")
    if options.visible is None:
        print(show.table(["what", "here"], [*gpus.machine_rows(), *gpus.gloo_rows()]))
        return
    if options.physical not in range(1, 17):
        raise UserError(f"--physical must be from 1 to 16, got {options.physical}")
    for value in options.visible if options.plot else []:
        check_drawable(value)
    print_map(options.visible, options.physical)
    if options.plot:
        draw_map(options.visible, options.physical, options.plot)


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
