"""Test `bench input`, `bench article`, and the tables and arguments of all benchmarks."""

import json
import random
import sys
from math import comb, log

import pytest

from accel_demo.config import TrainConfig
from accel_demo.errors import one_line_errors
from accel_demo.lab.bench import article, article_loop, input
from accel_demo.lab.bench import command as bench
from accel_demo.lab.measurements import Report, Table, median_interval
from accel_demo.lab.output import write_json
from accel_demo.lab.timed_command import run_timed
from accel_demo.models import make_model


@pytest.mark.slow
def test_we_read_images_far_faster_than_torchvision(start, tmp_path):
    written, plot = tmp_path / "input.json", tmp_path / "input.svg"
    command = ["accel-demo", "bench", "input", "--quick", "--json", written, "--plot", plot]
    result = start(command)
    assert result.returncode == 0, result.stderr
    reading, table, waiting = (part.splitlines() for part in result.stdout.split("\n\n")[:3])
    assert reading == ["Reading images (1 repeat)"]
    head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table)
    assert head == ["", "images/s", "ratio"]
    rows = [name for name, *_ in rows]
    assert rows == [
        "ours, 0 workers",
        "ours, 0 workers, augmented",
        "torchvision, 0 workers",
        "torchvision, 1 worker",
        "torchvision, 2 workers",
    ]
    assert waiting == ["Waiting for data (1 repeat)"]
    assert "| % of a step |" in result.stdout
    assert "float32 [128, 1, 28, 28], agree" in result.stdout

    report = json.loads(written.read_text())
    assert report["command"] == "bench input" and report["arguments"][0] == "bench"
    images, wait = (table["rows"] for table in report["tables"])
    assert list(images) == rows
    assert images["ours, 0 workers"]["median_ratio"] > 20
    assert f"reads {images['ours, 0 workers']['median_ratio']:,.0f} x" in result.stdout
    assert images["torchvision, 0 workers"]["median_ratio"] == 1
    assert 0 < wait["train.py, default run"]["median"] < 20
    assert "<svg" in plot.read_text()


def test_the_articles_network_has_the_shapes_of_our_resnet101():
    theirs = article_loop.make_model().state_dict()
    ours = make_model(TrainConfig(model="resnet101")).state_dict()
    assert {name: value.shape for name, value in theirs.items()} == {
        name: value.shape for name, value in ours.items()
    }


@pytest.mark.parametrize(("steps", "warm_up"), [(3, 2), (6, 2), (60, 10), (400, 10)])
def test_the_warm_up_never_takes_all_steps(steps, warm_up):
    assert article_loop.warm_up_steps(steps) == warm_up


def test_the_findings_report_a_cpu_without_bf16_instructions():
    sentences = article.findings({"ours, fp32": 1.5}, {"ours, fp32": 2.0}, steps=4)
    assert sentences[0] == "Our loop in fp32: 1.5 x the images/s of the article's loop."
    assert "no bf16 instructions" in sentences[1]
    ratio = {"ours, fp32": 1.5, "ours, bf16": 8.0}
    best, _ = article.findings(ratio, {"ours, bf16": 2.0}, steps=4)
    assert best == "Our loop in bf16: 8.0 x the images/s of the article's loop."


def test_the_error_for_a_child_that_fails_contains_its_stderr():
    with pytest.raises(RuntimeError, match="the disk is full"):
        run_timed([sys.executable, "-c", "raise SystemExit('the disk is full')"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_both_loops_train_the_articles_network(start, tmp_path):
    written = tmp_path / "article.json"
    command = ["accel-demo", "bench", "article", "--repeats", 1, "--steps", 3, "--json", written]
    result = start(command, timeout=580, OMP_NUM_THREADS="2")
    assert result.returncode == 0, result.stderr
    (table,) = json.loads(written.read_text())["tables"]
    assert list(table["rows"])[:2] == ["the article's loop", "ours, fp32"]
    assert all(row["median"] > 0 for row in table["rows"].values())
    assert "Mean training loss of steps 3 to 3: the article's loop " in result.stdout


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["input", "--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["speed"], "invalid choice: 'speed' (choose from "),
        (["input", "--json", "{folder}/none/x.json"], "cannot write --json {folder}/none/x.json"),
        (["input", "--plot", "{folder}/x.txt"], "--plot takes a .png, .svg or .pdf file, got "),
        (["article", "--steps", "2"], "--steps must be at least 3, got 2"),
    ],
)
def test_invalid_arguments_print_one_line_before_any_measurement(
    arguments, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(input, "measure", None)  # calling it would raise a TypeError
    monkeypatch.setattr(article, "run_timed", None)
    with pytest.raises(SystemExit) as stopped, one_line_errors():
        bench.main([argument.format(folder=tmp_path) for argument in arguments])
    assert stopped.value.code == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith("error: ") and output.err.count("\n") == 1
    assert message.format(folder=tmp_path) in output.err
    assert list(tmp_path.iterdir()) == []
