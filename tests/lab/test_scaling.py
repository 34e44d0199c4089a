"""Test the fits of Amdahl's and Gustafson's laws, and the output of `accel-demo scaling`."""

import dataclasses
import re
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_demo.config import TrainConfig
from accel_demo.data import load_datasets
from accel_demo.errors import UserError
from accel_demo.guess import comparison
from accel_demo.lab.scaling import command as scaling
from accel_demo.lab.scaling import tables
from accel_demo.lab.scaling.fit import LAWS, amdahl, fit, gustafson, serial_share_of
from accel_demo.lab.scaling.measurement import first_gpus
from accel_demo.lab.scaling.result import (
    GilRow,
    ScalingResult,
    fits_of,
    scaling_cases,
    scaling_rows,
)
from tests.lab.measured import run_measured

SCALINGS = st.sampled_from(["strong", "weak"])
SHARES = st.floats(0, 1)
WORKERS = ("one after the other", "two threads", "two processes")
COUNTS = st.lists(st.integers(2, 64), min_size=1, max_size=6, unique=True)


@given(SCALINGS, SHARES, COUNTS)
def test_a_fit_to_an_exact_curve_recovers_its_serial_share(scaling, share, counts):
    speedups = {count: LAWS[scaling](share, count) for count in [1, *counts]}
    assert serial_share_of(LAWS[scaling], speedups) == pytest.approx(share, abs=1e-9)


@given(SCALINGS, COUNTS, st.data())
def test_the_fitted_share_minimizes_the_squared_error(scaling, counts, data):
    law = LAWS[scaling]
    speedups = {count: data.draw(st.floats(0.2, 2 * count)) for count in counts}
    share = serial_share_of(law, speedups)

    def squares(share):
        if law is amdahl:
            times = {count: share + (1 - share) / count for count in counts}
            return sum((times[count] - 1 / speedups[count]) ** 2 for count in counts)
        return sum((law(share, count) - speedups[count]) ** 2 for count in counts)

    assert squares(share) <= min(squares(share + step) for step in (-1e-3, 1e-3)) + 1e-12


@given(
    st.floats(0.05, 0.9), st.lists(st.floats(-0.1, 0.1), min_size=5, max_size=25), st.floats(1, 4)
)
def test_the_width_of_the_interval_is_proportional_to_the_noise(share, noise, factor):
    def width(size):
        times = [share + (1 - share) / 2 + size * error for error in noise]
        speedups = {1: [1.0] * len(noise), 2: [1 / time for time in times]}
        low, high = fit("strong", "raw DDP", speedups).interval
        return high - low

    assert width(factor) == pytest.approx(factor * width(1), abs=1e-9)
    assert width(0) == pytest.approx(0, abs=1e-9)


@given(SCALINGS, SHARES, st.lists(st.floats(-0.02, 0.02), min_size=5, max_size=15))
def test_the_interval_contains_the_share_and_lies_within_the_measured_shares(scaling, share, noise):
    exact = {count: LAWS[scaling](share, count) for count in (1, 2, 4)}
    speedups = {count: [exact[count] * (1 + error) for error in noise] for count in exact}
    result = fit(scaling, "raw DDP", speedups)
    low, high = result.interval
    assert min(result.shares) <= low <= result.serial_share <= high <= max(result.shares)


def test_the_misfit_is_small_only_if_the_speedups_follow_the_law():
    def misfit(speedups):
        return fit("strong", "raw DDP", {n: [speedup] for n, speedup in speedups.items()}).misfit

    assert misfit({count: amdahl(0.2, count) for count in (1, 2, 4)}) == pytest.approx(0, abs=1e-12)
    assert misfit({1: 1.0, 2: 1.9, 4: 0.9}) > 0.3
    with pytest.raises(ValueError, match="needs more than one"):
        serial_share_of(amdahl, {1: 1.0})


def test_the_first_gpus_are_the_first_ones_visible_to_this_process(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,2")
    assert [first_gpus(count) for count in (1, 2, 3)] == ["3", "3,1", "3,1,2"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert first_gpus(2) == "0,1"


def test_the_largest_run_uses_all_images_of_the_synthetic_dataset():
    too_many = TrainConfig(dataset="synthetic", train_samples=scaling.MOST_IMAGES + 1)
    with pytest.raises(UserError, match=f"must be at most {scaling.MOST_IMAGES} for synthetic"):
        load_datasets(too_many)


def test_one_process_is_measured_once_for_strong_and_weak_scaling():
    cases = scaling_cases([1, 2], 128)
    assert [dataclasses.astuple(case) for case in cases] == [
        ("plain PyTorch", 1, 128),
        *(("raw DDP", 1, 128), ("raw DDP", 2, 64), ("raw DDP", 2, 128)),
        *(("Accelerate", 1, 128), ("Accelerate", 2, 64), ("Accelerate", 2, 128)),
    ]


def made_up(share: float, counts: list[int], cores: int, threads: int = 1) -> ScalingResult:
    """Make up a result in which DDP follows both laws exactly, and Accelerate is 10 % slower."""
    rates = {}
    for case in scaling_cases(counts, 120):
        law = gustafson if case.batch_size == 120 else amdahl
        speed = law(share, case.processes) * (0.9 if case.version == "Accelerate" else 1)
        rates[case] = [speed * rate for rate in (1000, 1100, 900, 1000, 1050)]
    rows = scaling_rows(rates, counts, 120)
    gil_rows = [
        GilRow(work, workers, [speedup] * 5, speedup, [0.9, speedup], cores_busy=speedup)
        for work, second in (("preprocessing in Python", 1.0), ("matrix products in torch", 1.9))
        for workers, speedup in zip(WORKERS, (1.0, second, 1.9), strict=True)
    ]
    measured = {"rows": rows, "fits": fits_of(rows), "has_gil": True, "gil_rows": gil_rows}
    chosen = {"model": "small_cnn", "batch_size": 120, "steps": 6, "repeats": 5}
    return ScalingResult(counts, threads, "cpu", cores, **chosen, **measured)


def test_fits_compare_a_version_with_itself_and_speedups_compare_it_with_plain_pytorch():
    result = made_up(0.25, [1, 2, 4], cores=4)
    for fitted in result.fits:
        assert fitted.serial_share == pytest.approx(0.25)
        assert fitted.misfit == pytest.approx(0, abs=1e-9)
    by_name = {(row.scaling, row.version, row.processes): row for row in result.rows}
    assert by_name["weak", "raw DDP", 4].median_speedup == pytest.approx(gustafson(0.25, 4))
    accelerate = by_name["strong", "Accelerate", 4]
    assert accelerate.median_speedup == pytest.approx(0.9 * amdahl(0.25, 4))
    assert by_name["strong", "raw DDP", 4].efficiency == pytest.approx(amdahl(0.25, 4) / 4)
    assert by_name["strong", "plain PyTorch", 1].speedups == [1.0] * 5


def test_the_text_explains_the_fits_and_which_processes_share_cores():
    crowded = tables.text(made_up(0.25, [1, 2, 4], cores=2))
    assert "4 processes with 1 thread each share 2 cores" in crowded
    assert re.search(r"Amdahl, strong scaling +\| raw DDP +\| 0\.250 ", crowded)
    assert "Above 1" not in crowded and "Below 0" not in crowded and "Noise" not in crowded
    alone = tables.text(made_up(0.25, [1], cores=2, threads=4))
    assert "1 process with 4 threads each share 2 cores" in alone
    assert "Above 1: slower than one process" in tables.text(made_up(1.5, [1, 2, 4], cores=2))
    assert "Below 0: faster than the ideal" in tables.text(made_up(-0.1, [1, 2, 4], cores=2))


def test_the_picture_names_every_version_and_law_and_the_shared_cores(tmp_path):
    tables.draw(made_up(0.25, [1, 2, 4], cores=2), tmp_path / "drawn.svg")
    drawn = (tmp_path / "drawn.svg").read_text()
    words = ("ideal", "plain PyTorch", "raw DDP", "Accelerate", "Amdahl, share 0.25")
    for word in (*words, "Gustafson, share 0.25", "cores are shared", "two threads"):
        assert f"<!-- {word} -->" in drawn
    assert drawn.count("<!-- Gustafson, share 0.25 -->") == 2  # raw DDP and Accelerate


def test_a_law_is_fitted_only_to_at_least_three_process_counts(tmp_path):
    two = made_up(0.25, [1, 2], cores=2)
    assert two.fits == [] and "serial share" not in tables.text(two)
    assert len(made_up(0.25, [1, 2, 4], cores=2).fits) == 4
    tables.draw(two, tmp_path / "drawn.svg")
    drawn = (tmp_path / "drawn.svg").read_text()
    assert "Amdahl" not in drawn and "Gustafson" not in drawn


def test_error_bars_are_the_intervals_of_the_table(tmp_path):
    result = made_up(0.25, [1, 2], cores=2)
    assert re.search(r"two processes +\| 1.90 +\| 0.90 – 1.90 ", tables.text(result))
    assert tables.error_bars(result.gil_rows[2:3]) == [[pytest.approx(1.0)], [0]]
    tables.draw(result, tmp_path / "drawn.svg")
    drawn = (tmp_path / "drawn.svg").read_text()
    assert "<!-- error bars: 90 % intervals of the medians -->" in drawn


def test_with_fewer_than_five_repeats_there_are_no_error_bars(measured):
    assert "needs 5 repeats" in measured.stdout
    assert "<!-- error bars: none, with fewer than 5 repeats -->" in measured.picture


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The output, the JSON and the picture of one run with --quick."""
    command = "scaling --quick --model tiny_cnn --guess 1.9"
    return run_measured(tmp_path_factory.mktemp("scaling"), command, timeout=300)


def test_the_guess_is_compared_with_the_speed_up_of_accelerate_on_two_processes(measured):
    [speedup] = [
        row["median_speedup"]
        for row in measured.json["rows"]
        if (row["scaling"], row["version"], row["processes"]) == ("strong", "Accelerate", 2)
    ]
    assert f"\n{comparison(1.9, speedup, '×')}\n" in measured.stdout


def test_every_case_ran_on_the_reported_number_of_connected_processes(measured):
    result = measured.json
    assert (result["processes"], result["threads"], result["device"]) == ([1, 2], 1, "cpu")
    rows = [(r["scaling"], r["version"], r["processes"], r["batch_size"]) for r in result["rows"]]
    for scaled, divided in (("strong", 64), ("weak", 128)):
        assert [row[1:] for row in rows if row[0] == scaled] == [
            ("plain PyTorch", 1, 128),
            *(("raw DDP", 1, 128), ("raw DDP", 2, divided)),
            *(("Accelerate", 1, 128), ("Accelerate", 2, divided)),
        ]
    assert "1, 2 connected processes" in measured.stdout
    assert "scaling: run 0/14" in measured.stderr


def test_speedups_are_computed_from_the_images_per_second(measured):
    rows = {(r["scaling"], r["version"], r["processes"]): r for r in measured.json["rows"]}
    plain = rows["strong", "plain PyTorch", 1]["images_per_second"]
    for row in rows.values():
        pairs = zip(row["images_per_second"], plain, strict=True)
        speedups = [rate / alone for rate, alone in pairs]
        assert row["speedups"] == pytest.approx(speedups) and min(speedups) > 0
        assert row["efficiency"] == pytest.approx(statistics.median(speedups) / row["processes"])
    assert measured.json["fits"] == []


def test_the_output_and_the_picture_contain_the_gil_measurement(measured):
    rows = {(row["work"], row["workers"]): row for row in measured.json["gil_rows"]}
    works = ("preprocessing in Python", "matrix products in torch")
    assert list(rows) == [(work, workers) for work in works for workers in WORKERS]
    for (work, workers), row in rows.items():
        assert re.search(rf"\| {work} +\| {workers} +\|", measured.stdout)
        assert 0 < row["cores_busy"] < 2.2
    if measured.json["has_gil"]:  # two threads never run Python at the same time
        assert rows["preprocessing in Python", "two threads"]["cores_busy"] < 1.15
    assert "<!-- two threads -->" in measured.picture and "<!-- raw DDP -->" in measured.picture
