"""Test which runs `accel-demo parity` expects to end with equal weights, and which really do."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from accel_demo.config import TrainConfig
from accel_demo.lab.parity.comparison import compare, compare_pairs
from accel_demo.lab.parity.pairs import (
    BOUND,
    NOTHING,
    SAME_BITS,
    WITHIN_BOUND,
    Pair,
    ParityRow,
    ParityRun,
    StateDifference,
)
from accel_demo.models import make_model
from tests.conftest import REPOSITORY
from tests.lab.measured import run_measured

TIME_LIMIT = 230  # seconds


def rows_of(content: dict) -> list[ParityRow]:
    rows = [ParityRow(**row) for row in content["rows"]]
    for row in rows:
        row.difference = StateDifference(**row.difference)
    return rows


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return run_measured(tmp_path_factory.mktemp("parity"), "parity --quick")


@pytest.fixture(scope="module")
def rows(quick):
    return rows_of(quick.json)


def test_all_versions_on_the_same_number_of_processes_have_bitwise_equal_weights(rows):
    rows = [row for row in rows if row.kind == "versions"]
    assert [(row.pair, row.connected_processes) for row in rows] == [
        ("train.py and train_plain.py", [1, 1]),
        ("train.py and train_dp.py", [1, 1]),
        ("train.py and train_ddp.py", [1, 1]),
        ("train.py and train_ddp.py", [2, 2]),
    ]
    for row in rows:
        assert row.promised == SAME_BITS and row.difference.same_file and row.why == ""
        assert row.difference.weights == row.difference.statistics == 0


def test_two_processes_and_one_process_that_accumulates_agree_within_the_bound(rows):
    """The saved files differ, because the running statistics come from different batches."""
    (row,) = [row for row in rows if row.kind == "accumulated"]
    assert row.connected_processes == [2, 1]
    assert row.promised == WITHIN_BOUND and row.difference.weights <= BOUND
    assert not row.difference.same_file and row.difference.statistics > 1e-4
    assert "running statistics are from rank 0's batches" in row.why


def test_one_large_batch_has_different_batch_statistics(rows):
    (row,) = [row for row in rows if row.kind == "one batch"]
    assert row.connected_processes == [2, 1] and row.promised == NOTHING
    assert row.difference.weights > BOUND
    assert row.why == "BatchNorm normalizes over 64 images instead of 32"


def test_the_table_has_a_row_for_each_pair_with_its_process_counts(quick, rows):
    output = quick.stdout
    lines = [line for line in output.splitlines() if line.startswith("|")][2:]
    assert len(lines) == len(rows) == 6
    for line, row in zip(lines, rows, strict=True):
        first, second = row.connected_processes
        assert row.pair in line and f"| {first} and {second} " in line
        assert f") {row.why}\n" in output or not row.why
    assert "(1) " in output and "All 5 promises are kept." in output


def test_the_picture_names_every_pair(quick, rows):
    for row in rows:
        assert f"<!-- {row.pair}  [" in quick.picture
    assert "<!-- bits -->" in quick.picture and "<!-- nothing promised -->" in quick.picture


def test_a_version_that_trains_differently_breaks_its_promise(start, tmp_path):
    """Run a copy of the package in which train_ddp.py does not smooth labels."""
    copy = tmp_path / "accel_demo"
    shutil.copytree(
        REPOSITORY / "accel_demo", copy, ignore=shutil.ignore_patterns("__pycache__", "bench/*.md")
    )
    script = copy / "train_ddp.py"
    right, wrong = "label_smoothing=config.label_smoothing", "label_smoothing=0.0"
    assert script.read_text().count(right) == 1
    script.write_text(script.read_text().replace(right, wrong))
    options = ["--processes", 1, "--steps", 1, "--model", "tiny_cnn", "--json", "parity.json"]
    command = ["python", "-m", "accel_demo", "parity", *options]
    result = start(command, timeout=TIME_LIMIT, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert result.returncode == 1, result.stdout + result.stderr
    assert "1 of 3 promises are broken: train.py and train_ddp.py." in result.stdout
    rows = rows_of(json.loads((tmp_path / "parity.json").read_text()))
    assert [row.keeps_promise for row in rows] == [True, True, False]
    assert "a broken promise" in rows[2].why and rows[2].difference.weights > 0


@pytest.fixture
def saved(tmp_path):
    """`saved(change)` saves a model before and after `change`, and compares the two files."""

    def saved(change, kind="versions", processes=1, model="small_cnn", optimizer="sgd"):
        config = TrainConfig(model=model, optimizer=optimizer, max_steps=8)
        torch.manual_seed(0)
        state_dict = make_model(config).state_dict()
        first = ParityRun("train", processes)
        second = ParityRun("train", 1, 3)
        if kind == "versions":
            second = ParityRun("train_ddp", processes)
        for run in (first, second):
            (tmp_path / run.name).mkdir(exist_ok=True)
            tensors = {name: tensor.contiguous() for name, tensor in state_dict.items()}
            save_file(tensors, tmp_path / run.name / "model.safetensors")
            change(state_dict)
        pair = Pair(kind, first, second)
        both = {run: {"processes": run.processes, "device": "cpu"} for run in (first, second)}
        return compare_pairs([pair], config, both, tmp_path)[0]

    return saved


def flip_last_bit(state_dict):
    state_dict["0.weight"].view(torch.int32)[0, 0, 0, 0] ^= 1


def count_a_batch_more(state_dict):
    state_dict["2.num_batches_tracked"] += 1


def lose_a_number(state_dict):
    state_dict["0.weight"][0, 0, 0, 0] = float("nan")


def move_by_more_than_the_bound(state_dict):
    state_dict["0.weight"][0, 0, 0, 0] += 10 * BOUND


@pytest.mark.parametrize("change", [flip_last_bit, count_a_batch_more, lose_a_number])
def test_one_changed_bit_in_a_saved_file_breaks_the_promise(change, saved):
    row = saved(change)
    assert row.promised == SAME_BITS and not row.difference.same_file
    assert not row.keeps_promise and "a broken promise" in row.why
    assert (row.difference.weights > 0) == (change is not count_a_batch_more)


def test_two_runs_with_nan_at_the_same_position_are_equal():
    lost = {"weight": torch.tensor([1.0, float("nan")])}
    difference = compare(lost, {"weight": lost["weight"].clone()}, {"weight"})
    assert difference.same_file and difference.weights == 0


def test_a_difference_above_the_bound_breaks_the_promise(saved):
    choices = {"kind": "accumulated", "processes": 3, "model": "tiny_cnn"}
    kept = saved(flip_last_bit, **choices)
    assert kept.promised == WITHIN_BOUND and kept.keeps_promise and not kept.difference.same_file
    assert "they round at different points" in kept.why
    assert not saved(move_by_more_than_the_bound, **choices).keeps_promise
    assert not saved(lose_a_number, **choices).keeps_promise


@pytest.mark.parametrize(
    ("choices", "why"),
    [
        ({"model": "tiny_cnn", "optimizer": "adamw"}, "tiny errors become whole steps"),
        ({"model": "small_cnn"}, "errors grow from step to step"),
    ],
)
def test_nothing_is_promised_if_rounding_errors_grow(choices, why, saved):
    row = saved(move_by_more_than_the_bound, "accumulated", 3, **choices)
    assert row.promised == NOTHING and row.keeps_promise and why in row.why


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["tiny_cnn", "tiny_gpt"])
def test_the_promises_also_hold_for_three_processes(model, tmp_path):
    ran = run_measured(tmp_path, f"parity --processes 2,3 --model {model} --steps 20")
    rows = {(row.kind, row.connected_processes[0]): row for row in rows_of(ran.json)}
    assert len(rows) == len(ran.json["rows"]) == 6
    for count in (2, 3):
        assert rows["versions", count].difference.same_file
        assert rows["versions", count].connected_processes == [count, count]
        for kind in ("accumulated", "one batch"):
            row = rows[kind, count]
            assert row.connected_processes == [count, 1] and row.promised == WITHIN_BOUND
    assert rows["accumulated", 2].difference.same_file
    assert not rows["accumulated", 3].difference.same_file
    assert "DDP multiplies each gradient by 1/3" in rows["accumulated", 3].why
