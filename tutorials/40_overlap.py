"""Calculate how much of the all-reduce time a model with eight layers can hide behind backward.

python tutorials/40_overlap.py

The program trains nothing. It assumes that backward takes one unit of time per layer, that a bucket
is sent as soon as all its gradients are ready and the previous bucket has been sent, and that each
all-reduce has a small fixed cost.
"""

from accel_demo.options import Parser
from accel_demo.show import COLORS, new_figure, save, table

LAYERS, COST = 8, 0.3  # fixed cost of one all-reduce, in units of time
# (all-reduce time without fixed costs / backward time, layers per bucket)
CASES = [(share, layers) for share in (0.5, 1.0, 2.0) for layers in (8, 2, 1)]


def sends(share: float, layers: int) -> list[tuple[float, float]]:
    """Return a (start, end) pair for each all-reduce in one of the `CASES`."""
    link_is_free_at, spans = 0.0, []
    for ready_at in range(layers, LAYERS + 1, layers):
        start = max(ready_at, link_is_free_at)
        link_is_free_at = start + COST + share * layers
        spans.append((start, link_is_free_at))
    return spans


def hidden(spans: list[tuple[float, float]]) -> float:
    """Return the fraction of the all-reduce time that overlaps with backward."""
    under = sum(max(0.0, min(end, LAYERS) - start) for start, end in spans)
    return under / sum(end - start for start, end in spans)


def draw(path) -> None:
    figure = new_figure(6.4, 4.6)
    axis = figure.subplots()
    for row, (share, layers) in enumerate(CASES):
        place = row + row // 3 * 0.6
        sent = sends(share, layers)
        axis.barh(place - 0.2, LAYERS, 0.34, color=COLORS[5])
        bars = [(start, end - start) for start, end in sent]
        axis.broken_barh(bars, (place + 0.03, 0.34), color=COLORS[3], edgecolor="white")
        text = f"{hidden(sent):.0%} hidden, ends at {sent[-1][1]:.1f}"
        axis.text(sent[-1][1] + 0.2, place, text, va="center", fontsize=9)
    axis.axvline(LAYERS, color="0.4", linewidth=0.8, linestyle="--")
    names = [
        f"{share:g} ×, {LAYERS // layers} bucket{'s' * (layers < 8)}" for share, layers in CASES
    ]
    axis.set_yticks([row + row // 3 * 0.6 for row in range(len(CASES))], names, fontsize=9)
    axis.invert_yaxis()
    axis.set_xlabel("time, in layers of backward (blue: backward, orange: all-reduce)")
    axis.set_xlim(0, 36)
    axis.spines[["top", "right"]].set_visible(False)
    save(figure, path)


if __name__ == "__main__":
    options = Parser(__doc__, plot=True).parse_args()
    rows = []
    for share, layers in CASES:
        sent = sends(share, layers)
        total = f"{sent[-1][1] / LAYERS:.2f} × backward"
        rows.append([f"{share:g} ×", LAYERS // layers, f"{hidden(sent):.0%}", total])
    print(table(["all-reduce takes", "buckets", "hidden", "everything ends after"], rows))
    if options.plot:
        draw(options.plot)
