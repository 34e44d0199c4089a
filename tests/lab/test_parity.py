"""The ledger of the tellings: who has the same weights as whom, who promised, and who breaks it."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from accel_demo.config import TrainConfig
from accel_demo.errors import UserError
from accel_demo.lab.parity import command as parity
from accel_demo.lab.parity import ledger as parity_ledger
from accel_demo.lab.parity import tables
from accel_demo.lab.parity.ledger import BOUND, NOTHING, SAME_BITS, has_kept_its_promise
from accel_demo.lab.parity.runs import ParityRun
from accel_demo.models import make_model
from tests.conftest import REPOSITORY, run_to_end

TIME_LIMIT = 230  # seconds


def run_parity(folder, *options) -> SimpleNamespace:
    files = ["--json", folder / "parity.json", "--plot", folder / "parity.svg"]
    result = run_to_end(["accel-demo", "parity", *options, *files], TIME_LIMIT)
    assert result.stderr.count("Traceback") == 0, result.stderr
    found = json.loads((folder / "parity.json").read_text())
    picture = (folder / "parity.svg").read_text()
    return SimpleNamespace(result=result, found=found, picture=picture, rows=found["rows"])


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return run_parity(tmp_path_factory.mktemp("parity"), "--quick")


def test_every_telling_at_the_same_number_of_processes_has_the_same_bits(quick):
    assert quick.result.returncode == 0, quick.result.stdout + quick.result.stderr
    rows = [row for row in quick.rows if row["kind"] == "tellings"]
    assert [(row["pair"], row["connected_processes"]) for row in rows] == [
        ("train.py and train_plain.py", [1, 1]),
        ("train.py and train_dp.py", [1, 1]),
        ("train.py and train_ddp.py", [1, 1]),
        ("train.py and train_ddp.py", [2, 2]),
    ]
    for row in rows:
        assert row["promised"] == SAME_BITS and row["same_file"] and row["why"] == ""
        assert row["weights_differ_by"] == row["statistics_differ_by"] == 0


def test_two_processes_and_one_that_accumulates_have_the_same_weights(quick):
    """But not the same file: the running statistics are of other batches."""
    (row,) = [row for row in quick.rows if row["kind"] == "accumulated"]
    assert row["connected_processes"] == [2, 1]
    assert row["promised"] == BOUND and row["weights_differ_by"] <= BOUND
    assert not row["same_file"] and row["statistics_differ_by"] > 1e-4
    assert "running statistics are of rank 0's batches" in row["why"]


def test_one_large_batch_has_other_batch_statistics(quick):
    (row,) = [row for row in quick.rows if row["kind"] == "one batch"]
    assert row["connected_processes"] == [2, 1] and row["promised"] == NOTHING
    assert row["weights_differ_by"] > BOUND
    assert row["why"] == "BatchNorm normalises by 64 images instead of 32"


def test_the_table_has_a_row_for_each_pair_and_names_its_processes(quick):
    lines = [line for line in quick.result.stdout.splitlines() if line.startswith("|")][2:]
    assert len(lines) == len(quick.rows) == 6
    for line, row in zip(lines, quick.rows, strict=True):
        first, second = row["connected_processes"]
        assert row["pair"] in line and f"| {first} and {second} " in line
    assert "(1) " in quick.result.stdout and "All 5 promises are kept." in quick.result.stdout


def test_markdown_has_the_reasons_the_machine_and_the_versions(quick):
    text = tables.markdown(quick.found)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 8 and len({line.count("|") for line in lines}) == 1
    for line, row in zip(lines[2:], quick.rows, strict=True):
        assert row["why"] in line
    last = text.splitlines()[-1]
    assert last.startswith("Measured on ") and f"torch {torch.__version__.split('+')[0]}" in last


def test_the_picture_says_which_are_the_same(quick):
    for row in quick.rows:
        assert f"<!-- {row['pair']}  [" in quick.picture
    assert "<!-- bits -->" in quick.picture and "<!-- nothing promised -->" in quick.picture


def test_a_telling_that_does_something_else_breaks_its_promise(start, tmp_path):
    """In a copy of the package whose train_ddp.py smooths no labels."""
    copy = tmp_path / "accel_demo"
    shutil.copytree(
        REPOSITORY / "accel_demo", copy, ignore=shutil.ignore_patterns("__pycache__", "bench/*.md")
    )
    telling = copy / "train_ddp.py"
    right, wrong = "label_smoothing=config.label_smoothing", "label_smoothing=0.0"
    assert telling.read_text().count(right) == 1
    telling.write_text(telling.read_text().replace(right, wrong))
    options = ["--processes", 1, "--steps", 1, "--model", "tiny_cnn", "--json", "found.json"]
    command = ["python", "-m", "accel_demo.cli", "parity", *options]
    result = start(command, timeout=TIME_LIMIT, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert result.returncode == 1, result.stdout + result.stderr
    assert "1 of 3 promises broken: train.py and train_ddp.py." in result.stdout
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [has_kept_its_promise(row) for row in rows] == [True, True, False]
    assert "a broken promise" in rows[2]["why"] and rows[2]["weights_differ_by"] > 0


@pytest.fixture
def saved(tmp_path):
    """`saved(change)`: the ledger's row for two files, the second of which `change` has altered."""

    def saved(change, kind="tellings", processes=1, model="small_cnn", **choices) -> dict:
        choices = {"model": model, "optimizer": "sgd", "max_steps": 8, **choices}
        torch.manual_seed(0)
        state_dict = make_model(TrainConfig(**choices)).state_dict()
        first = ParityRun("Accelerate", processes)
        second = (
            ParityRun("raw DDP", processes) if kind == "tellings" else ParityRun("Accelerate", 1, 3)
        )
        for run in (first, second):
            (tmp_path / run.name).mkdir(exist_ok=True)
            tensors = {name: tensor.contiguous() for name, tensor in state_dict.items()}
            save_file(tensors, tmp_path / run.name / "model.safetensors")
            change(state_dict)
        pair = parity_ledger.Pair(kind, first, second)
        found = {run: {"processes": run.processes, "device": "cpu"} for run in (first, second)}
        return parity_ledger.ledger([pair], choices, found, tmp_path)[0]

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
    assert row["promised"] == SAME_BITS and not row["same_file"]
    assert not has_kept_its_promise(row) and "a broken promise" in row["why"]
    assert (row["weights_differ_by"] > 0) == (change is not count_a_batch_more)


def test_two_runs_that_lose_the_same_number_are_the_same():
    lost = {"weight": torch.tensor([1.0, float("nan")])}
    found = parity_ledger.compare(lost, {"weight": lost["weight"].clone()}, {"weight"})
    assert found["same_file"] and found["weights_differ_by"] == 0


def test_a_bound_is_kept_or_broken_by_the_weights(saved):
    choices = {"kind": "accumulated", "processes": 3, "model": "tiny_cnn"}
    kept = saved(flip_last_bit, **choices)
    assert kept["promised"] == BOUND and has_kept_its_promise(kept) and not kept["same_file"]
    assert "rounded in other places" in kept["why"]
    assert not has_kept_its_promise(saved(move_by_more_than_the_bound, **choices))
    assert not has_kept_its_promise(saved(lose_a_number, **choices))


@pytest.mark.parametrize(
    ("choices", "why"),
    [
        ({"model": "tiny_cnn", "optimizer": "adamw"}, "tiny errors become whole steps"),
        ({"model": "small_cnn"}, "errors grow from step to step"),
    ],
)
def test_where_rounding_errors_grow_nothing_is_promised(choices, why, saved):
    row = saved(move_by_more_than_the_bound, "accumulated", 3, **choices)
    assert row["promised"] == NOTHING and has_kept_its_promise(row) and why in row["why"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--processes 0", "--processes must be at least 1"),
        ("--processes two", "--processes takes 2, or 1,2,4"),
        ("--steps 0", "--steps must be at least 1, got 0"),
        ("--batch-size 0", "batch_size must be at least 1, got 0"),
        ("--steps 100000", "choose fewer --steps or a smaller --batch-size"),
        ("--model resnet18 --batch-size 1", "takes batches of two images or more"),
        ("--model alexnet", "invalid choice: 'alexnet'"),
        ("--plot parity.txt", "--plot takes a .png, .svg or .pdf file"),
        ("--prosesses 2", "unrecognized arguments"),
    ],
)
def test_what_cannot_be_trained_is_said_before_anything_is_started(options, message, tmp_path):
    with pytest.raises(UserError, match=message):
        parity.read(options.replace("parity.txt", str(tmp_path / "parity.txt")).split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_processes_have_the_same_bits_too_and_accumulate_within_the_bound(tmp_path):
    ran = run_parity(tmp_path, *"--processes 2,3 --model tiny_cnn --steps 20 --markdown".split())
    assert ran.result.returncode == 0, ran.result.stdout + ran.result.stderr
    found = {(row["kind"], row["connected_processes"][0]): row for row in ran.rows}
    assert len(found) == len(ran.rows) == 6
    for count in (2, 3):
        assert found["tellings", count]["same_file"]
        assert found["tellings", count]["connected_processes"] == [count, count]
        for kind in ("accumulated", "one batch"):
            row = found[kind, count]
            assert row["connected_processes"] == [count, 1] and row["promised"] == BOUND
    assert found["accumulated", 2]["same_file"]
    assert not found["accumulated", 3]["same_file"]
    assert "DDP takes 1/3 of each gradient" in found["accumulated", 3]["why"]
    assert "Measured on " in ran.result.stdout
