"""When does an all-reduce hide under backward? A model of eight layers, without any process.

python tutorials/14_overlap.py

Backward computes eight gradients, one unit of time each. A bucket is sent once all of its gradients
are there, and buckets are sent one after the other, each with a small price of its own.
"""

from accel_demo.anatomy.flags import command_line, read
from accel_demo.show import COLOURS, new_figure, save, table

LAYERS, PRICE = 8, 0.3  # of one all-reduce, however small
CASES = [  # all-reduce of everything in the time of backward, and the layers in a bucket
    *((0.5, layers) for layers in (8, 2, 1)),
    *((1.0, layers) for layers in (8, 2, 1)),
    *((2.0, layers) for layers in (8, 2, 1)),
]


def sends(share: float, layers: int) -> list[tuple[float, float]]:
    """(start, end) of each all-reduce. `share` is what all gradients take, over backward."""
    link_is_free_at, found = 0.0, []
    for ready_at in range(layers, LAYERS + 1, layers):
        start = max(ready_at, link_is_free_at)
        link_is_free_at = start + PRICE + share * layers
        found.append((start, link_is_free_at))
    return found


def hidden(found: list[tuple[float, float]]) -> float:
    """The share of the sending that happens while backward still computes."""
    under = sum(max(0.0, min(end, LAYERS) - start) for start, end in found)
    return under / sum(end - start for start, end in found)


def draw(path) -> None:
    figure = new_figure(8.5, 4.2)
    axis = figure.subplots()
    for row, (share, layers) in enumerate(CASES):
        place = row + row // 3 * 0.6
        found = sends(share, layers)
        axis.barh(place - 0.2, LAYERS, 0.34, color=COLOURS[5])
        spans = [(start, end - start) for start, end in found]
        axis.broken_barh(spans, (place + 0.03, 0.34), color=COLOURS[3], edgecolor="white")
        axis.text(found[-1][1] + 0.2, place, f"{hidden(found):.0%} hidden", va="center", fontsize=9)
    axis.axvline(LAYERS, color="0.4", linewidth=0.8, linestyle="--")
    names = [
        f"{share:g} ×, {LAYERS // layers} bucket{'s' * (layers < 8)}" for share, layers in CASES
    ]
    axis.set_yticks([row + row // 3 * 0.6 for row in range(len(CASES))], names, fontsize=9)
    axis.invert_yaxis()
    axis.set_xlabel("time, in layers of backward (blue: backward, red: all-reduce)")
    axis.set_xlim(0, 28)
    axis.spines[["top", "right"]].set_visible(False)
    save(figure, path)


if __name__ == "__main__":
    options = read(command_line(__doc__))
    rows = []
    for share, layers in CASES:
        found = sends(share, layers)
        longer = found[-1][1] / LAYERS
        rows.append(
            [f"{share:g} ×", LAYERS // layers, f"{hidden(found):.0%}", f"{longer:.2f} × backward"]
        )
    print(table(["all-reduce takes", "buckets", "hidden", "all of it ends after"], rows))
    if options.plot:
        draw(options.plot)
