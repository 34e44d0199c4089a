"""Draw the curves of the runs as inline SVG. The tooltips in page.js use the same geometry."""

import math
from dataclasses import dataclass

from accel_demo.lab.report.runs import Point
from accel_demo.lab.report.tables import number
from accel_demo.lab.web_page import escape
from accel_demo.show import COLORS

WIDTH, HEIGHT = 380, 220  # SVG units; the page scales each chart to the width of its column
LEFT, RIGHT, TOP, BOTTOM = 50, 368, 10, 184  # edges of the plot area
DASHES = ("", "7 3", "2 3", "9 3 2 3")
MARKERS = (  # SVG paths, about 8 units wide and centered at (0, 0)
    "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0z",
    "M-3.2-3.2h6.4v6.4h-6.4z",
    "M0-4.4L4.4 0L0 4.4L-4.4 0z",
    "M0-4.2L4 3H-4z",
    "M0 4.2L4-3H-4z",
)
MOST_MARKERS = 8  # per line; more markers would hide the line
MOST_POINTS = 4000  # per line; `thinned` removes points from longer curves
LOG_SCALE_RATIO = 30  # use a log scale for a loss if maximum / minimum exceeds this


@dataclass(frozen=True)
class LineStyle:
    """How to draw a run's curves. `stroke` contains SVG attributes, and `marker` is an SVG path."""

    color: str
    stroke: str
    marker: str


@dataclass(frozen=True)
class Axes:
    """The ranges of a chart's axes: 0 to `right` for x, and `low` to `high` for y."""

    right: float
    low: float
    high: float
    is_log: bool

    def x(self, value: float) -> float:
        """Convert a value on the x axis to an x coordinate of the SVG."""
        return round(LEFT + value / self.right * (RIGHT - LEFT), 1)

    def y(self, value: float) -> float:
        """Convert a value on the y axis to a y coordinate of the SVG."""
        scaled = math.log10 if self.is_log else float
        low, high = scaled(self.low), scaled(self.high)
        return round(BOTTOM - (scaled(value) - low) / (high - low) * (BOTTOM - TOP), 1)


def style_of(index: int) -> LineStyle:
    """Return the line style of the run with this index. The first 40 runs have different styles."""
    color, dashes = COLORS[index % 8], DASHES[(index + index // 8) % 4]
    stroke = f'fill="none" stroke="{color}" stroke-width="2"'
    stroke += f' stroke-dasharray="{dashes}"' if dashes else ""
    return LineStyle(color, stroke, MARKERS[index % 5])


def swatch(index: int) -> str:
    """Return a sample of a run's line as SVG, for legends and headings."""
    style = style_of(index)
    return (
        '<svg class="swatch" viewBox="0 0 30 12" aria-hidden="true">'
        f'<path d="M1 6H29" {style.stroke}/>'
        f'<path d="{style.marker}" transform="translate(15 6)" fill="{style.color}"/></svg>'
    )


def thinned(points: list[Point]) -> list[Point]:
    """Reduce a curve to at most `MOST_POINTS` points without changing its outline.

    A longer curve is split into parts with the same number of points, and only the first, lowest,
    highest and last points of each part are kept.
    """
    if len(points) <= MOST_POINTS:
        return points
    size = math.ceil(len(points) / (MOST_POINTS // 4))
    kept = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        values = [value for _, value in part]
        lowest, highest = values.index(min(values)), values.index(max(values))
        kept += [part[index] for index in sorted({0, lowest, highest, len(part) - 1})]
    return kept


def chart(name: str, title: str, lines: list[list[Point]], axis: str, right: int) -> str:
    """Return an SVG chart of one metric with a line for each run, or "" if there are no values.

    `lines` contains the (x, value) points of each run. `axis` is the label of the x axis, which
    ends at `right`.
    """
    values = [value for points in lines for _, value in points]
    if not values:
        return ""
    low, high = min(values), max(values)
    is_log = name.endswith("loss") and low > 1e-9 and high > LOG_SCALE_RATIO * low
    y_ticks = log_ticks(low, high) if is_log else ticks(low, high)
    axes = Axes(right or 1, min(low, y_ticks[0]), max(high, y_ticks[-1]), is_log)
    parts = _axes(axes, y_ticks, axis)
    for index, points in enumerate(lines):
        parts += _line(points, axes, style_of(index))
    label = f"{title} over {axis}: {len(values)} values from {number(low)} to {number(high)}"
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" '
        f'aria-label="{escape(label)}" data-curve="{name}" data-right="{axes.right}" '
        f'data-low="{axes.low!r}" data-high="{axes.high!r}" data-log="{int(is_log)}" '
        f'data-axis="{axis}">{"".join(parts)}<g class="guide"></g></svg>'
    )


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Return evenly spaced round numbers that cover the range from `low` to `high`.

    `about` is the approximate number of intervals. If `low` and `high` are nearly equal, the ticks
    start or end at 0.
    """
    if high - low <= max(1e-30, 1e-9 * abs(high)):
        low, high = (min(low, 0), max(high, 0)) if abs(high) > 1e-30 else (0, 1)
    span = high - low
    power = 10 ** math.floor(math.log10(span / about))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor * about >= span)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, max(last, first + 1) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return up to seven powers of ten that cover the range from `low` to `high`."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    step = math.ceil((last - first) / 6) or 1
    last = first + math.ceil((last - first) / step) * step
    return [10.0**power for power in range(first, last + 1, step)]


def tick_text(value: float) -> str:
    """Format the label of a tick, such as 0.05, 1,500, 2M or 1e+09."""
    if abs(value) >= 1e9 or 0 < abs(value) < 1e-4:
        return f"{value:.3g}"
    if abs(value) >= 1e6:
        return f"{value / 1e6:,.6g}M"
    return f"{value:,.10g}"


def _axes(axes: Axes, y_ticks: list[float], axis: str) -> list[str]:
    parts = []
    for value in y_ticks:
        y = axes.y(value)
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{RIGHT}"/>')
        parts.append(f'<text class="end" x="{LEFT - 6}" y="{y + 4:.1f}">{tick_text(value)}</text>')
    for value in (tick for tick in ticks(0, axes.right) if tick <= axes.right * 1.0001):
        x = axes.x(value)
        parts.append(f'<path class="tick" d="M{x} {BOTTOM}v4"/>')
        anchor, text_x = ("end", WIDTH) if x > RIGHT - 12 else ("middle", x)
        parts.append(
            f'<text class="{anchor}" x="{text_x}" y="{BOTTOM + 16}">{tick_text(value)}</text>'
        )
    middle, unit = (LEFT + RIGHT) / 2, ", y axis on a log scale" if axes.is_log else ""
    parts.append(f'<text class="middle" x="{middle}" y="{HEIGHT - 5}">{axis}{unit}</text>')
    return parts


def _line(points: list[Point], axes: Axes, style: LineStyle) -> list[str]:
    """Return one run's line and markers as SVG paths. Break the line wherever x decreases."""
    places = [(axes.x(x), axes.y(value)) for x, value in points]
    path, last_x = "", math.inf
    for x, y in places:
        path += f"{'L' if x >= last_x else 'M'}{x} {y}"
        last_x = x
    parts = [f'<path class="line" d="{path}" {style.stroke}/>'] if path else []
    stride = math.ceil(len(places) / MOST_MARKERS) or 1
    for x, y in places[::-1][::stride]:  # from the end, so that the last point gets a marker
        shape = f'd="{style.marker}" fill="{style.color}"'
        parts.append(f'<path class="mark" transform="translate({x} {y})" {shape}/>')
    return parts
