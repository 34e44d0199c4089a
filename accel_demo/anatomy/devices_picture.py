"""Draw how CUDA_VISIBLE_DEVICES renumbers the GPUs: the picture of `devices --visible`."""

from pathlib import Path

from accel_demo.anatomy import show
from accel_demo.anatomy.devices import visible_devices


def draw_map(values: list[str], physical: int, file: Path) -> None:
    """For each value: the machine's GPUs, the ids as written, PyTorch's devices."""
    figure = show.new_figure(8, 2.5 * len(values))
    for row, value in enumerate(values, start=1):
        _draw_one_map(figure.add_subplot(len(values), 1, row), value, physical)
    show.save(figure, file)


def _draw_one_map(axes, value: str, physical: int) -> None:
    found, written = visible_devices(value, physical), value.split(",")
    colours, red, grey = [show.COLOURS[0], show.COLOURS[2], show.COLOURS[4]], "#d55e00", "#707070"
    places = {gpu: place for place, gpu in enumerate(found.values())}
    axes.set(xlim=(-2.7, max(physical, 2 * len(written)) - 0.4), ylim=(-0.45, 2.45))
    axes.axis("off")
    levels = ["PyTorch's devices", f"CUDA_VISIBLE_DEVICES\n= {value}", "the machine's GPUs"]
    for y, level in enumerate(levels):
        axes.text(-2.7, y, level, va="center", fontsize=10)

    def box(x: int, y: int, text: str, colour: str) -> None:
        frame = {"boxstyle": "round,pad=0.4", "facecolor": "white", "edgecolor": colour}
        axes.text(x, y, text, ha="center", va="center", color=colour, fontsize=10, bbox=frame)

    for gpu in range(physical):
        box(gpu, 2, f"GPU {gpu}", colours[places[gpu] % 3] if gpu in places else grey)
    for place, word in enumerate(written):
        x = 1 + 2 * place
        if place < len(found):
            gpu, colour = found[f"cuda:{place}"], colours[place % 3]
            axes.plot([gpu, x, x], [2, 1, 0], color=colour, zorder=0)
            box(x, 0, f"cuda:{place}", colour)
        else:
            colour = red if place == len(found) else grey
            says = f"no GPU for {word}" if place == len(found) else "so this is hidden"
            axes.text(x, 0.5, says, ha="center", color=colour, fontsize=10)
        box(x, 1, word, colour)
