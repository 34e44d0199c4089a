"""What a benchmark found: tables of repeated measurements, and sentences with the figures."""

import dataclasses
import json
import math
import statistics
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

from accel_demo.lab import machine
from accel_demo.wording import counted


@dataclass
class Table:
    """Measurements of several things, taken in turns: repeat i of each row belongs together.

    `rows` maps a row's name to its values, one per repeat. Ratios are to the row `reference`,
    repeat by repeat, so that a slow minute of the machine slows both sides. A table without a
    reference has no ratios.
    """

    title: str
    unit: str
    rows: dict[str, list[float]]
    reference: str | None = None
    digits: int = 1

    def ratios(self, name: str) -> list[float]:
        """The row's values over the reference's, repeat by repeat."""
        assert self.reference is not None
        pairs = zip(self.rows[name], self.rows[self.reference], strict=True)
        return [value / reference for value, reference in pairs]

    def text(self) -> str:
        head = ["", "median", "min – max"]
        head += ["ratio", "90 % interval"] if self.reference else []
        lines = [head]
        for name, values in self.rows.items():
            low, high = min(values), max(values)
            cells = [name, self._number(statistics.median(values))]
            cells.append(f"{self._number(low)} – {self._number(high)}")
            if self.reference == name:
                cells += ["1", ""]
            elif self.reference:
                ratios = self.ratios(name)
                interval = " – ".join(f"{bound:.3g}" for bound in median_interval(ratios))
                cells += [f"{statistics.median(ratios):.3g}", interval]
            lines.append(cells)
        repeats = len(next(iter(self.rows.values())))
        title = f"{self.title} ({self.unit}, {counted(repeats, 'repeat')})"
        return f"{title}\n{aligned(lines)}"

    def _number(self, value: float) -> str:
        return f"{value:,.{self.digits}f}"


@dataclass
class Report:
    """The result of one benchmark. `findings` are sentences, `facts` the same as numbers."""

    benchmark: str
    tables: list[Table]
    findings: list[str] = field(default_factory=list)
    facts: dict = field(default_factory=dict)

    def text(self) -> str:
        """The tables, the findings and the machine, to print."""
        found = machine.environment()
        last = f"Measured on {found['cpu']}, {found['cores']} cores, {found['gpu'] or 'no GPU'}, "
        last += f"torch {found['torch']}, accelerate {found['accelerate']}."
        parts = [table.text() for table in self.tables]
        return "\n\n".join([*parts, *filter(None, ["\n".join(self.findings)]), last])

    def write_json(self, path: Path) -> None:
        """Every single measurement, what was found, the command and the environment."""
        tables = []
        for table in self.tables:
            rows = {}
            for name, values in table.rows.items():
                rows[name] = {"median": statistics.median(values), "values": values}
                if table.reference:
                    ratios = table.ratios(name)
                    rows[name]["ratio"] = statistics.median(ratios)
                    rows[name]["ratio_90_percent_interval"] = median_interval(ratios)
            tables.append({**dataclasses.asdict(table), "rows": rows})
        content = {
            "benchmark": self.benchmark,
            "arguments": sys.argv[1:],
            "environment": machine.environment(),
            "tables": tables,
            "findings": self.findings,
            "facts": self.facts,
        }
        path.write_text(json.dumps(content, indent=2) + "\n")

    def draw(self, path: Path) -> None:
        """One panel per table: a bar to the median, a line from the lowest to the highest value."""
        from matplotlib.figure import Figure

        rows = [len(table.rows) for table in self.tables]
        figure = Figure(figsize=(9, 0.9 * len(rows) + 0.5 * sum(rows)), layout="constrained")
        panels = figure.subplots(len(rows), 1, squeeze=False, height_ratios=rows)[:, 0]
        for table, axis in zip(self.tables, panels, strict=True):
            names = [textwrap.fill(name, 36) for name in table.rows]
            values = list(table.rows.values())
            medians = [statistics.median(one) for one in values]
            below = [median - min(one) for median, one in zip(medians, values, strict=True)]
            above = [max(one) - median for median, one in zip(medians, values, strict=True)]
            axis.barh(names, medians, xerr=[below, above], color="tab:blue", capsize=3)
            axis.invert_yaxis()
            axis.set_title(table.title, loc="left", fontsize=10)
            axis.set_xlabel(table.unit)
            axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=120)


def median_interval(values: list[float], confidence: float = 0.9) -> list[float]:
    """The k-th lowest and k-th highest value that hold the median with at least this confidence.

    The narrowest such pair. It assumes nothing of the values' distribution but that they are
    independent. Below five values no pair reaches 90 %: then it is empty.
    Source: David and Nagaraja, Order Statistics, 3rd edition, section 7.1.
    """
    ordered, count = sorted(values), len(values)
    below = 0.0  # the probability that the median lies below the k-th lowest value
    bounds: list[float] = []
    for k in range(1, count // 2 + 1):
        below += math.comb(count, k - 1) / 2**count
        if 2 * below > 1 - confidence:
            break
        bounds = [ordered[k - 1], ordered[count - k]]
    return bounds


def aligned(lines: list[list[str]]) -> str:
    """The cells in columns: names to the left, numbers to the right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = []
    for name, *cells in lines:
        numbers = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        text.append("  ".join([name.ljust(widths[0]), *numbers]).rstrip())
    return "\n".join(f"  {line}" for line in text)
