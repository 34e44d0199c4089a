"""The serial share is fitted as the laws say it, and `accel-demo scaling` says what it measured."""

import json
import re
import statistics
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_demo.config import TrainConfig
from accel_demo.data import load_datasets
from accel_demo.errors import UserError
from accel_demo.lab.scaling import command as scaling
from accel_demo.lab.scaling import reasons, tables
from accel_demo.lab.scaling.fit import amdahl, fit, gustafson, serial_share_of
from tests.conftest import run_to_end

LAWS = st.sampled_from([amdahl, gustafson])
SHARES = st.floats(0, 1)
COUNTS = st.lists(st.integers(2, 64), min_size=1, max_size=6, unique=True)


@given(LAWS, SHARES, COUNTS)
def test_an_exact_curve_gives_back_its_serial_share(law, share, counts):
    speedups = {count: law(share, count) for count in [1, *counts]}
    assert serial_share_of(law, speedups) == pytest.approx(share, abs=1e-9)


@given(LAWS, COUNTS, st.data())
def test_no_other_share_is_nearer_to_the_measured_points(law, counts, data):
    speedups = {count: data.draw(st.floats(0.2, 2 * count)) for count in counts}
    share = serial_share_of(law, speedups)

    def squares(share):
        if law is amdahl:
            own = {count: share + (1 - share) / count for count in counts}
            return sum((own[count] - 1 / speedups[count]) ** 2 for count in counts)
        return sum((law(share, count) - speedups[count]) ** 2 for count in counts)

    assert squares(share) <= min(squares(share + step) for step in (-1e-3, 1e-3)) + 1e-12


@given(
    st.floats(0.05, 0.9),
    st.lists(st.floats(-0.1, 0.1), min_size=5, max_size=25),
    st.floats(1, 4),
)
def test_more_noise_widens_the_error_as_much(share, noise, factor):
    def width(size):
        times = [share + (1 - share) / 2 + size * one for one in noise]
        low, high = fit(amdahl, {1: [1.0] * len(noise), 2: [1 / t for t in times]})["interval"]
        return high - low

    assert width(factor) == pytest.approx(factor * width(1), abs=1e-9)
    assert width(0) == pytest.approx(0, abs=1e-9)


@given(LAWS, SHARES, st.lists(st.floats(-0.02, 0.02), min_size=5, max_size=15))
def test_the_interval_holds_the_share_and_lies_within_the_repeats(law, share, noise):
    speedups = {count: [law(share, count) * (1 + one) for one in noise] for count in (1, 2, 4)}
    found = fit(law, speedups)
    low, high = found["interval"]
    assert min(found["shares"]) <= low <= found["serial_share"] <= high <= max(found["shares"])


def test_one_count_fits_any_speedup_and_two_counts_show_where_the_law_does_not_hold():
    assert fit(amdahl, {1: [1.0], 2: [1.2]})["misfit"] is None
    exact = {count: [amdahl(0.2, count)] for count in (1, 2, 4)}
    assert fit(amdahl, exact)["misfit"] == pytest.approx(0, abs=1e-12)
    assert fit(amdahl, {1: [1.0], 2: [1.9], 4: [0.9]})["misfit"] > 0.3
    with pytest.raises(ValueError, match="needs more than one"):
        serial_share_of(amdahl, {1: 1.0})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--processes", "1,3"], "--batch-size 128 is no multiple of 3"),
        (["--processes", "two"], "--processes takes 2, or 1,2,4; got two"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--threads", "100000"], "100000 threads are too many"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--batch-size", "25002"], "--batch-size must be at most 25000 here, got 25002"),
        (["--model", "resnet18", "--batch-size", "2"], "batches of two images or more: 1 is left"),
        (["--plot", "picture.bmp"], "--plot takes a .png, .svg or .pdf file"),
        (["--lanes"], "unrecognized arguments: --lanes"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(monkeypatch, arguments, said):
    monkeypatch.setattr(scaling, "WorkerPool", None)
    with pytest.raises(UserError, match=said):
        scaling.main(arguments)


def test_the_first_gpus_are_those_that_this_process_sees(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,2")
    assert [scaling.first_gpus(count) for count in (1, 2, 3)] == ["3", "3,1", "3,1,2"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert scaling.first_gpus(2) == "0,1"


def test_the_most_images_of_one_run_are_those_of_the_synthetic_dataset():
    too_many = TrainConfig(dataset="synthetic", train_samples=scaling.MOST_IMAGES + 1)
    with pytest.raises(UserError, match=f"must be at most {scaling.MOST_IMAGES} for synthetic"):
        load_datasets(too_many)


def test_one_process_is_measured_once_for_both_scalings():
    assert scaling.cases_for([1, 2], 128) == [
        ("plain PyTorch", 1, 128),
        ("raw DDP", 1, 128),
        ("raw DDP", 2, 64),
        ("raw DDP", 2, 128),
        ("Accelerate", 1, 128),
        ("Accelerate", 2, 64),
        ("Accelerate", 2, 128),
    ]


def made_up(share: float, counts: list[int], cores: int) -> dict:
    """What `measure` would find where DDP follows both laws, and Accelerate is 10 % slower."""
    rates, connected = {}, {}
    for telling, processes, batch in scaling.cases_for(counts, 120):
        law = gustafson if batch == 120 else amdahl
        speed = law(share, processes) * (0.9 if telling == "Accelerate" else 1)
        rates[telling, processes, batch] = [speed * one for one in (1000, 1100, 900, 1000, 1050)]
        connected[telling, processes, batch] = processes
    rows = scaling.rows_of(rates, connected, counts, 120)
    work = {
        kind: {
            way: {"speedup": one, "speedups": [one], "cores_busy": one}
            for way, one in zip(ways, (1.0, second, 1.9), strict=True)
        }
        for kind, second in (("preprocessing in Python", 1.0), ("matrix products in torch", 1.9))
        for ways in [("one after the other", "two threads", "two processes")]
    }
    return {
        **{"processes": counts, "threads": 1, "device": "cpu", "cores": cores, "steps": 6},
        **{"model": "small_cnn", "batch_size": 120, "repeats": 5, "rows": rows},
        **{"fits": scaling.fits_of(rows), "gil": {"has_gil": True, "repeats": 1, "work": work}},
    }


def test_fits_compare_a_telling_with_itself_and_speedups_with_plain_pytorch():
    found = made_up(0.25, [1, 2, 4], cores=4)
    for one in found["fits"]:
        assert one["serial_share"] == pytest.approx(0.25)
        assert one["misfit"] == pytest.approx(0, abs=1e-9)
    by_name = {(r["scaling"], r["telling"], r["processes"]): r for r in found["rows"]}
    assert by_name["weak", "raw DDP", 4]["speedup"] == pytest.approx(gustafson(0.25, 4))
    assert by_name["strong", "Accelerate", 4]["speedup"] == pytest.approx(0.9 * amdahl(0.25, 4))
    assert by_name["strong", "raw DDP", 4]["efficiency"] == pytest.approx(amdahl(0.25, 4) / 4)
    assert by_name["strong", "plain PyTorch", 1]["speedups"] == [1.0] * 5


def test_the_text_says_what_the_counts_can_tell_and_who_shares_cores():
    crowded = tables.text(made_up(0.25, [1, 2, 4], cores=2))
    assert "4 processes with 1 thread each share 2 cores" in crowded
    assert "cannot show that the law holds" not in crowded
    two = tables.text(made_up(0.25, [1, 2], cores=2))
    assert "cannot show that the law holds" in two and " share 2 cores" not in two
    assert "Above 1" not in two and "Below 0" not in two and "Noise" not in two
    alone = tables.text(made_up(0.25, [1], cores=2) | {"threads": 4})
    assert "1 process with 4 threads each share 2 cores" in alone
    assert "Above 1: slower than one process" in tables.text(made_up(1.5, [1, 2], cores=2))
    assert "Below 0: faster than the ideal" in tables.text(made_up(-0.1, [1, 2], cores=2))


def test_the_picture_names_every_telling_and_law_and_the_shared_cores(tmp_path):
    tables.draw(made_up(0.25, [1, 2, 4], cores=2), tmp_path / "drawn.svg")
    drawn = (tmp_path / "drawn.svg").read_text()
    words = ("ideal", "plain PyTorch", "raw DDP", "Accelerate", "Amdahl, share 0.25")
    for word in (*words, "Gustafson, share 0.25", "cores are shared", "two threads"):
        assert f"<!-- {word} -->" in drawn


def test_a_reason_is_shown_with_both_figures_and_the_interval_of_their_ratio():
    names = "DDP|small batch|large batch|share every micro-batch|no_sync|one bucket|small buckets|"
    names += "bf16 hook|gradient_as_bucket_view|find_unused_parameters|no buffers|straggler|"
    names += "all threads|Python in the loop|one process, large batch|one process, small batch"
    ms = {name: [10.0] * 5 for name in names.split("|")}
    ms["one process, small batch"] = [4.0] * 5  # two processes take 10 ms for twice the images
    ms["no_sync"] = [4.0, 5.0, 5.0, 5.0, 6.0]
    by_rank = {"straggler": [30.0, 31.0]}
    found = {"processes": 2, "ms_per_step": ms, "ms_by_rank": by_rank, "megabytes": 7.5}
    found |= {"first_steps": [50.0, 10.0, 10.0, 10.0], "to_first_step": 5.0}
    rows = {row[0]: row[3] for row in reasons.rows_of(found)}
    assert len(rows) == 12  # without the one that only Linux can measure
    assert rows["more to send than to compute"].endswith("batch 8 0.80 ×, batch 512 2.00 ×")
    expected = "8 × 8 images: 10.0 → 5.0 ms (× 0.40 – 0.60)"
    assert rows["sharing in every micro-batch"] == expected
    assert rows["start-up"] == "5.0 s to the first step: 500 steps' worth"
    ms["half of the cores"] = [20.0] * 5
    rows = {row[0]: row[3] for row in reasons.rows_of(found)}
    assert rows["processes share cores"].endswith("20.0 → 10.0 ms (× 0.50 – 0.50)")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """One quick run of the verb: what it printed, its JSON and its picture."""
    folder = tmp_path_factory.mktemp("scaling")
    files = ["--json", folder / "found.json", "--plot", folder / "drawn.svg"]
    command = ["accel-demo", "scaling", "--quick", "--model", "tiny_cnn", *files]
    result = run_to_end(command, timeout=300)
    assert result.returncode == 0, result.stderr
    found = json.loads((folder / "found.json").read_text())
    drawn = (folder / "drawn.svg").read_text()
    return SimpleNamespace(stdout=result.stdout, stderr=result.stderr, found=found, drawn=drawn)


def test_every_case_ran_in_as_many_connected_processes_as_it_says(measured):
    found = measured.found
    assert (found["processes"], found["threads"], found["device"]) == ([1, 2], 1, "cpu")
    rows = [(r["scaling"], r["telling"], r["processes"], r["batch_size"]) for r in found["rows"]]
    for scaled, divided in (("strong", 64), ("weak", 128)):
        assert [row[1:] for row in rows if row[0] == scaled] == [
            ("plain PyTorch", 1, 128),
            *(("raw DDP", 1, 128), ("raw DDP", 2, divided)),
            *(("Accelerate", 1, 128), ("Accelerate", 2, divided)),
        ]
    assert "1, 2 connected processes" in measured.stdout
    assert "scaling: 100%" in measured.stderr


def test_speedups_and_shares_follow_from_the_images_per_second(measured):
    rows = {(r["scaling"], r["telling"], r["processes"]): r for r in measured.found["rows"]}
    plain = rows["strong", "plain PyTorch", 1]["images_per_second"]
    for row in rows.values():
        pairs = zip(row["images_per_second"], plain, strict=True)
        speedups = [one / alone for one, alone in pairs]
        assert row["speedups"] == pytest.approx(speedups) and min(speedups) > 0
        assert row["efficiency"] == pytest.approx(statistics.median(speedups) / row["processes"])
    for one in measured.found["fits"]:
        two, alone = (rows[one["scaling"], one["telling"], n]["images_per_second"] for n in (2, 1))
        ratios = [many / few for many, few in zip(two, alone, strict=True)]
        if one["law"] == "amdahl":  # 1/S = s + (1 − s)/2
            assert one["shares"] == pytest.approx([2 / ratio - 1 for ratio in ratios])
        else:  # S = 2 − s
            assert one["shares"] == pytest.approx([2 - ratio for ratio in ratios])
    assert len(measured.found["fits"]) == 4


def test_the_lock_is_part_of_the_output_and_of_the_picture(measured):
    kinds = measured.found["gil"]["work"]
    assert list(kinds) == ["preprocessing in Python", "matrix products in torch"]
    for kind, ways in kinds.items():
        assert list(ways) == ["one after the other", "two threads", "two processes"]
        for way, one in ways.items():
            assert re.search(rf"\| {kind} +\| {way} +\|", measured.stdout)
            assert 0 < one["cores_busy"] < 2.2
    if measured.found["gil"]["has_gil"]:  # two threads never run Python at the same time
        assert kinds["preprocessing in Python"]["two threads"]["cores_busy"] < 1.15
    assert "<!-- two threads -->" in measured.drawn and "<!-- raw DDP -->" in measured.drawn
