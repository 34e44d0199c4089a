"""Tables and reports of repeated measurements, with medians, ratios and confidence intervals."""

import math
import statistics
import textwrap
from dataclasses import InitVar, dataclass, field
from pathlib import Path

from accel_demo import show
from accel_demo.lab import load, machine
from accel_demo.wording import counted


@dataclass
class Measurements:
    """One table row: the value of each repetition, and its ratio to the reference row's value.

    `median_interval` computes the intervals. If the table has no reference row, `ratios` is empty
    and `median_ratio` is NaN.
    """

    values: list[float]
    ratios: list[float]
    median: float = field(init=False)
    interval: list[float] = field(init=False)
    median_ratio: float = field(init=False)
    ratio_interval: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.median = statistics.median(self.values)
        self.interval = median_interval(self.values)
        self.median_ratio = statistics.median(self.ratios) if self.ratios else math.nan
        self.ratio_interval = median_interval(self.ratios)


@dataclass
class Table:
    """A table of repeated measurements. Each repetition measures every row once.

    `values` maps the name of each row to its values. A ratio divides two values from the same
    repetition, so that a temporary slowdown of the machine affects both values. `digits` is the
    number of decimals.
    """

    title: str
    unit: str
    values: InitVar[dict[str, list[float]]]
    reference: str | None = None  # name of the row that the ratios are relative to
    digits: int = 1
    rows: dict[str, Measurements] = field(init=False)

    def __post_init__(self, values: dict[str, list[float]]) -> None:
        reference = values[self.reference] if self.reference else []
        self.rows = {}
        for name, row in values.items():
            pairs = zip(row, reference, strict=bool(reference))
            self.rows[name] = Measurements(row, [value / divisor for value, divisor in pairs])

    def text(self) -> str:
        """Return the title and the table in Markdown."""
        repeats = len(next(iter(self.rows.values())).values)
        head = ["", f"median ({self.unit})", "min – max", "ratio", "90 % interval"]
        lines = []
        for name, row in self.rows.items():
            numbers = (row.median, min(row.values), max(row.values))
            median, low, high = (f"{number:,.{self.digits}f}" for number in numbers)
            interval = " – ".join(f"{bound:.3g}" for bound in row.ratio_interval)
            lines.append([name, median, f"{low} – {high}", f"{row.median_ratio:.3g}", interval])
        if not self.reference:
            head, lines = head[:3], [line[:3] for line in lines]
        if repeats == 1:  # one value has no range or interval
            head, lines = ["", self.unit, *head[3:4]], [[*line[:2], *line[3:4]] for line in lines]
        return f"{self.title} ({counted(repeats, 'repeat')})\n\n{show.table(head, lines)}"


@dataclass
class Report:
    """The result of one benchmark.

    `findings` are the conclusions, as sentences. `facts` maps names to numbers and settings, such
    as "flops_per_step": 1.5e9 or "mixed_precision": "bf16".
    """

    tables: list[Table]
    findings: list[str]
    facts: dict[str, float | str] = field(default_factory=dict)

    def text(self) -> str:
        """Return the tables, the findings and one line that describes the machine."""
        findings = "\n".join(self.findings)
        parts = [*(table.text() for table in self.tables), findings, machine.sentence()]
        return "\n\n".join(filter(None, parts))

    def draw(self, path: Path) -> None:
        """Draw a panel for each table, with medians as bars and ranges as error bars."""
        heights = [len(table.rows) for table in self.tables]
        figure = show.new_figure(9, 0.9 * len(heights) + 0.5 * sum(heights))
        panels = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
        for table, axis in zip(self.tables, panels, strict=True):
            rows = table.rows.values()
            names = [textwrap.fill(name, 36) for name in table.rows]
            medians = [row.median for row in rows]
            repeats = len(next(iter(rows)).values)
            options = {"color": "tab:blue"}
            if repeats > 1:
                below = [row.median - min(row.values) for row in rows]
                above = [max(row.values) - row.median for row in rows]
                options |= {"xerr": [below, above], "capsize": 3}
            axis.barh(names, medians, **options)
            axis.invert_yaxis()
            axis.set_title(table.title, loc="left", fontsize=10)
            ranges = f"; median, with the range of {counted(repeats, 'repeat')}"
            axis.set_xlabel(table.unit + ranges * (repeats > 1))
            axis.spines[["top", "right"]].set_visible(False)
        show.save(figure, path, load.warning())


def median_interval(values: list[float], confidence: float = 0.9) -> list[float]:
    """Return the narrowest confidence interval for the median, without assuming a distribution.

    The bounds are the k-th lowest and the k-th highest value, for the largest k that still gives
    this confidence. The only assumption is that the values are independent. With fewer than five
    values, the result is [], because no interval has 90 % confidence.
    Source: David and Nagaraja, Order Statistics, 3rd edition, section 7.1.
    """
    ordered, count = sorted(values), len(values)
    below = 0.0  # probability that the median is below the k-th lowest value
    bounds: list[float] = []
    for k in range(1, count // 2 + 1):
        below += math.comb(count, k - 1) / 2**count
        if 2 * below > 1 - confidence:
            break
        bounds = [ordered[k - 1], ordered[count - k]]
    return bounds


def interval_text(interval: list[float], digits: int = 2) -> str:
    return " – ".join(f"{bound:.{digits}f}" for bound in interval) or "needs 5 repeats"
