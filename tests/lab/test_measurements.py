"""Test the tables of repeated measurements, and the confidence intervals of medians."""

import json
import random
from math import comb, log

import pytest

from accel_demo.lab.measurements import Report, Table, median_interval
from accel_demo.lab.output import write_json


def test_the_ends_of_the_interval_are_order_statistics():
    values = [float(value) for value in range(1, 16)]
    random.Random(0).shuffle(values)
    assert median_interval(values) == [4, 12]
    assert median_interval(values[:5]) == [min(values[:5]), max(values[:5])]
    assert median_interval(values[:4]) == median_interval([1.0]) == []


def test_90_percent_of_the_intervals_contain_the_median_and_narrower_ones_would_not():
    def coverage(k: int) -> float:
        """Return the chance that the median is between the k-th smallest and k-th largest value."""
        return sum(comb(15, below) for below in range(k, 15 - k + 1)) / 2**15

    assert coverage(4) >= 0.9 > coverage(5)
    generator, runs = random.Random(0), 4000
    held = 0
    for _ in range(runs):
        low, high = median_interval([generator.expovariate(1) for _ in range(15)])
        held += low <= log(2) <= high  # log(2) is the distribution's median
    assert held / runs == pytest.approx(coverage(4), abs=0.01)


def test_a_ratio_is_computed_within_each_repetition():
    """The machine is ten times slower in the second repetition, but the ratio stays the same."""
    table = Table("", "images/s", {"ours": [200.0, 20.0], "theirs": [100.0, 10.0]}, "theirs")
    assert table.rows["ours"].ratios == [2, 2]


def test_a_table_is_markdown_with_its_unit_in_the_header():
    rows = {"ours": [2000.0, 3300.0, 2100.0, 2200.0, 2300.0], "theirs": [1000.0] * 5}
    assert Table("Reading", "images/s", rows, "theirs", digits=0).text().splitlines() == [
        "Reading (5 repeats)",
        "",
        "|        | median (images/s) | min – max     | ratio | 90 % interval |",
        "| ------ | ----------------- | ------------- | ----- | ------------- |",
        "| ours   | 2,200             | 2,000 – 3,300 | 2.2   | 2 – 3.3       |",
        "| theirs | 1,000             | 1,000 – 1,000 | 1     | 1 – 1         |",
    ]
    assert Table("Waiting", "%", {"ours": [0.5]}).text().splitlines() == [
        "Waiting (1 repeat)",
        "",
        "|      | %   |",
        "| ---- | --- |",
        "| ours | 0.5 |",
    ]


def test_the_json_report_contains_values_medians_and_ratios(tmp_path):
    rows = {"ours": [2.0, 6.0, 2.0, 2.0, 2.0], "theirs": [1.0, 2.0, 1.0, 1.0, 1.0]}
    report = Report([Table("Reading", "images/s", rows, "theirs"), Table("Waiting", "%", rows)], [])
    write_json(tmp_path / "report.json", "bench input", report)
    with_ratios, without = json.loads((tmp_path / "report.json").read_text())["tables"]
    row = with_ratios["rows"]["ours"]
    assert (row["values"], row["median"], row["interval"]) == (rows["ours"], 2, [2, 6])
    ratios = ([2, 3, 2, 2, 2], 2, [2, 3])
    assert (row["ratios"], row["median_ratio"], row["ratio_interval"]) == ratios
    row = without["rows"]["ours"]
    assert (row["ratios"], row["median_ratio"], row["ratio_interval"]) == ([], None, [])
