"""One curve of several runs as inline SVG, and the numbers in it for the hover. Needs no torch."""

import math

from accel_demo.lab.report.compare import number
from accel_demo.lab.web_page import escape
from accel_demo.show import COLOURS

WIDTH, HEIGHT = 380, 220  # of the picture, in its own units; the page sets it to its column
LEFT, RIGHT, TOP, BOTTOM = 50, 12, 10, 36  # margins
DASHES = ("", "7 3", "2 3", "9 3 2 3")
SHAPES = (  # a marker of about 8 units around 0,0
    "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0z",
    "M-3.2-3.2h6.4v6.4h-6.4z",
    "M0-4.4L4.4 0L0 4.4L-4.4 0z",
    "M0-4.2L4 3H-4z",
    "M0 4.2L4-3H-4z",
)
MOST_MARKERS = 8  # on one run's curve, so that it stays a line
MOST_POINTS = 4000  # of one run's curve in one piece; beyond it, its outline is drawn
FARTHEST_LOG = 30  # a loss whose highest value is so many times its lowest gets a log scale


def mark_of(index: int) -> dict[str, str]:
    """Colour, dashes and marker of the run number `index`: 40 runs differ."""
    return {
        "colour": COLOURS[index % len(COLOURS)],
        "dashes": DASHES[(index + index // len(COLOURS)) % len(DASHES)],
        "shape": SHAPES[index % len(SHAPES)],
    }


def swatch(index: int) -> str:
    """A short piece of the line of run number `index`, for legends and headings."""
    mark = mark_of(index)
    return (
        '<svg class="swatch" viewBox="0 0 30 12" aria-hidden="true">'
        f'<path d="M1 6H29" {_stroke(mark)}/>'
        f'<path d="{mark["shape"]}" transform="translate(15 6)" fill="{mark["colour"]}"/></svg>'
    )


def thinned(pieces: list[list]) -> list[list]:
    """One run's curve with the same outline, drawn with some of its points.

    They are at most `MOST_POINTS`, and 4 more for each further piece.
    """
    points = sum(map(len, pieces))
    if points <= MOST_POINTS:
        return pieces
    size = math.ceil(points / (MOST_POINTS // 4))
    return [_outline(piece, size) for piece in pieces]


def chart(
    name: str, title: str, pieces: list[list], per_step: list[int], axis: str, right: int
) -> str:
    """The SVG of one curve: `pieces` of each run, drawn at step × `per_step` of its run.

    `axis` names what is to the right, which ends at `right`. The colours of the runs are those of
    `mark_of`. Returns "" where no run has a value.
    """
    values = [value for run in pieces for piece in run for _, value in piece]
    if not values:
        return ""
    right, low, high = right or 1, min(values), max(values)
    is_log = name.endswith("loss") and low > 1e-9 and high > FARTHEST_LOG * low
    y_ticks = log_ticks(low, high) if is_log else ticks(low, high)
    low, high = min(low, y_ticks[0]), max(high, y_ticks[-1])
    scale = {"right": right, "low": low, "high": high, "log": is_log}
    parts = [_axes(ticks(0, right), y_ticks, scale, axis)]
    for index, (run, factor) in enumerate(zip(pieces, per_step, strict=True)):
        parts += _curve(run, factor, scale, mark_of(index))
    label = f"{title} over {axis}: {len(values)} values from {number(low)} to {number(high)}"
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" '
        f'aria-label="{escape(label)}" data-curve="{name}" data-right="{right}" '
        f'data-low="{low!r}" data-high="{high!r}" data-log="{int(is_log)}" '
        f'data-axis="{escape(axis)}">{"".join(parts)}<g class="guide"></g></svg>'
    )


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers, from at most `low` to at least `high`, about so many steps apart.

    Where the two are the same number, or nearly, they begin at 0. Neither is negative.
    """
    if high - low <= max(1e-30, 1e-9 * high):
        low, high = 0, high if high > 1e-30 else 1
    span = high - low
    power = 10 ** math.floor(math.log10(span / about))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor * about >= span)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, max(last, first + 1) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, from at most `low` to at least `high`; every second or third where many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    step = math.ceil((last - first) / 6) or 1
    last = first + math.ceil((last - first) / step) * step
    return [10.0**power for power in range(first, last + 1, step)]


def tick_text(value: float) -> str:
    """0.05, 1,500, 2M, 1e+09."""
    if abs(value) >= 1e9 or 0 < abs(value) < 1e-4:
        return f"{value:.3g}"
    if abs(value) >= 1e6:
        return f"{value / 1e6:,.6g}M"
    return f"{value:,.10g}"


def _axes(x_ticks: list[float], y_ticks: list[float], scale: dict, axis: str) -> str:
    parts = []
    for value in y_ticks:
        y = _y(value, scale)
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="end" x="{LEFT - 6}" y="{y + 4:.1f}">{tick_text(value)}</text>')
    floor = HEIGHT - BOTTOM
    for value in (tick for tick in x_ticks if tick <= scale["right"] * 1.0001):
        x = _x(value, scale)
        parts.append(f'<path class="tick" d="M{x} {floor}v4"/>')
        kind, at = ("end", WIDTH) if x > WIDTH - 2 * RIGHT else ("middle", x)
        parts.append(f'<text class="{kind}" x="{at}" y="{floor + 16}">{tick_text(value)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    log = ", log scale upwards" if scale["log"] else ""
    parts.append(f'<text class="middle" x="{middle}" y="{HEIGHT - 5}">{escape(axis)}{log}</text>')
    return "".join(parts)


def _curve(run: list[list], factor: int, scale: dict, mark: dict[str, str]) -> list[str]:
    parts, places = [], []
    for piece in thinned(run):
        line = [(_x(step * factor, scale), _y(value, scale)) for step, value in piece]
        text = "L".join(f"{x} {y}" for x, y in line)
        parts.append(f'<path class="line" d="M{text}" {_stroke(mark)}/>')
        places += line
    stride = math.ceil(len(places) / MOST_MARKERS)
    for x, y in places[::-1][:: max(1, stride)]:  # the last value always has one
        shape = f'd="{mark["shape"]}" fill="{mark["colour"]}"'
        parts.append(f'<path class="mark" transform="translate({x} {y})" {shape}/>')
    return parts


def _stroke(mark: dict[str, str]) -> str:
    dashes = f' stroke-dasharray="{mark["dashes"]}"' if mark["dashes"] else ""
    return f'fill="none" stroke="{mark["colour"]}" stroke-width="2"{dashes}'


def _x(value: float, scale: dict) -> float:
    return round(LEFT + value / scale["right"] * (WIDTH - LEFT - RIGHT), 1)


def _y(value: float, scale: dict) -> float:
    low, high = scale["low"], scale["high"]
    if scale["log"]:
        value, low, high = math.log10(value), math.log10(low), math.log10(high)
    return round(HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)


def _outline(piece: list[list], size: int) -> list[list]:
    """Of each `size` points the first, the lowest, the highest and the last."""
    kept = []
    for start in range(0, len(piece), size):
        part = piece[start : start + size]
        some = [part[0], min(part, key=_value), max(part, key=_value), part[-1]]
        kept += sorted({tuple(point) for point in some})
    return [list(point) for point in kept]


def _value(point: list) -> float:
    return point[1]
