"""Test that the formulas of `accel-demo memory` agree with live tensors and process memory."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from accel_demo.anatomy.memory import batch, bytes_of, make_contiguous_model
from accel_demo.config import IMAGE_MODELS
from accel_demo.lab.memory import prediction
from accel_demo.lab.memory.formula import KINDS
from accel_demo.lab.memory.prediction import predict
from accel_demo.lab.memory.tables import LEFT_OUT
from accel_demo.wording import byte_size
from tests.conftest import GPUS, VISIBLE_GPUS
from tests.lab.measured import run_measured

EMPTY = dict.fromkeys(KINDS, 0)


def run_memory(folder, *options, **environment) -> SimpleNamespace:
    command = "memory --quick --optimizer adamw --batch-size 4 --guess 16"
    return run_measured(folder, command, *options, **environment)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return run_memory(tmp_path_factory.mktemp("memory"))


def parameter_bytes(model_name: str) -> int:
    return bytes_of(make_contiguous_model(model_name, torch.device("cpu")).parameters())


@pytest.mark.parametrize(
    "model_name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "resnet101")) for name in IMAGE_MODELS],
)
def test_the_formula_predicts_the_activations_of_every_model(model_name):
    """Compare with the tensors that autograd saves in a real forward pass."""
    model = make_contiguous_model(model_name, torch.device("cpu"))
    images, labels = batch(torch.device("cpu"))
    counted: set = set()
    bytes_of([images, labels, *model.parameters(), *model.buffers()], counted)
    saved = []

    def save(tensor):
        saved.append(tensor.detach())
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        loss = F.cross_entropy(model(images), labels)
    on_meta = prediction.on_meta(model_name)
    assert all(parameter.is_meta for parameter in on_meta.parameters())
    layers = prediction.activations(on_meta, len(images))
    total = layers + prediction.activations_of_the_loss(len(images))
    assert total == bytes_of(saved, counted) > 0
    assert loss.requires_grad


def test_a_layer_without_a_formula_is_rejected():
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10), nn.Sigmoid()).to("meta")
    with pytest.raises(ValueError, match="no formula for the activations of Sigmoid"):
        prediction.activations(model, 2)


def test_every_ddp_rank_keeps_everything_and_two_copies_of_the_gradients():
    size = parameter_bytes("tiny_cnn")
    for optimizer, states in (("adamw", 2), ("sgd", 1)):
        first, *others = predict("DDP", "tiny_cnn", optimizer, 3, batch_size=4)
        assert others == [first, first]
        kinds = {"parameters": size, "gradients": size, "buckets": size}
        kinds |= {"optimizer state": states * size, "activations": first["activations"]}
        assert first == EMPTY | kinds


def test_the_shards_of_fsdp_add_up_to_the_whole_model():
    size, model = parameter_bytes("vgg11"), prediction.on_meta("vgg11")
    for processes in (1, 2, 3, 4, 7):
        ranks = [prediction.fsdp(model, 2, rank, processes) for rank in range(processes)]
        assert sum(rank["optimizer state"] for rank in ranks) == 2 * size
        assert len({rank["parameters"] for rank in ranks}) == 1
        together = sum(rank["parameters"] for rank in ranks)
        assert size <= together <= 1.02 * size  # shards of the last layer are padded
        assert (together == size) == (processes in (1, 2))  # 3, 4 and 7 do not divide 10 classes


def test_data_parallel_devices_other_than_the_first_have_only_copied_weights_and_activations():
    size = parameter_bytes("small_cnn")
    first, *others = predict("nn.DataParallel", "small_cnn", "adamw", 3, batch_size=4)
    assert (first["parameters"], first["gradients"], first["copies"]) == (size, size, 0)
    for other in others:
        assert other == EMPTY | {"copies": size, "activations": other["activations"]}
    loss = prediction.activations_of_the_loss(12)
    assert first["activations"] == others[0]["activations"] + loss


def test_live_tensors_equal_the_formulas_to_the_byte(quick):
    rows = quick.json["rows"]
    assert [(row["strategy"], row["place"]) for row in rows] == [
        ("nn.DataParallel", "all 2 devices"),
        ("DDP", "rank 0"),
        ("DDP", "rank 1"),
        ("FSDP2", "rank 0"),
        ("FSDP2", "rank 1"),
    ]
    assert [row["connected_processes"] for row in rows] == [1, 2, 2, 2, 2]
    for row in rows:
        kinds = set(KINDS)
        if row["strategy"] == "nn.DataParallel":
            kinds.remove("activations")  # saved-tensor hooks do not run in the replicas' threads
        assert set(row["counted"]) == kinds
        for kind in kinds:
            assert row["counted"][kind] == row["predicted"][kind], (row, kind)


def check_measured(result: dict, megabytes: float, kinds_within: float, sum_within: float) -> None:
    """Check the sum of all kinds of memory, and each kind that should take `megabytes` or more."""
    for row in result["rows"]:
        sums = [sum(row[column].values()) for column in ("predicted", "measured")]
        assert sums[1] == pytest.approx(sums[0], rel=sum_within), row
        for kind in KINDS:
            predicted = row["predicted"][kind]
            if predicted >= megabytes * 1e6:
                # During the measurement, libraries and thread stacks may allocate up to 1 MiB.
                near = pytest.approx(predicted, rel=kinds_within, abs=2**20)
                assert row["measured"][kind] == near, kind


def test_the_process_grows_by_what_the_formulas_predict(quick):
    """vgg11 with AdamW takes over 190 MB. Check every kind of memory that takes at least 5 MB."""
    assert sum(quick.json["rows"][1]["predicted"].values()) > 190e6
    check_measured(quick.json, megabytes=5, kinds_within=0.05, sum_within=0.03)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_of_170_megabytes_is_measured_within_three_percent(tmp_path):
    ran = run_memory(tmp_path, *"--model resnet101 --optimizer sgd --batch-size 2".split())
    assert 4 * ran.json["parameters"] > 169e6
    check_measured(ran.json, megabytes=50, kinds_within=0.03, sum_within=0.03)


def test_the_guess_is_compared_with_the_bytes_per_parameter_of_ddp(quick):
    """AdamW takes 16 bytes per parameter, and DDP's buckets take 4 more."""
    assert "Your guess: 16 bytes. The result: 20 bytes. Your guess is too low" in quick.stdout


def test_the_output_shows_each_formula_with_its_error_and_lists_the_omissions(quick):
    lines = [line for line in quick.stdout.splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    rows = {tuple(row[:3]): row[3:] for row in cells}
    assert len(rows) == len(cells) == 5 + 2 * 5 + 2 * 5 + 5
    assert rows["DDP", "rank 1", "buckets"][0] == "4P"
    assert rows["FSDP2", "rank 0", "optimizer state"][0] == "8P / N"
    assert all(row[-1].endswith("%") for row in rows.values())
    assert "2 connected processes on cpu" in quick.stdout
    first, second = quick.json["predicted_data_parallel_devices"]
    assert first == predict("nn.DataParallel", "vgg11", "adamw", 2, 4)[0]
    assert f"device 1 {byte_size(sum(second.values()))}." in quick.stdout
    assert len(LEFT_OUT.splitlines()) == 7 and LEFT_OUT in quick.stdout


def test_the_picture_has_a_predicted_bar_next_to_each_measured_bar(quick):
    assert quick.picture.count("<!-- by formula -->") == len(quick.json["rows"])
    assert quick.picture.count("<!-- measured -->") == len(quick.json["rows"])
    assert all(f"<!-- {kind} -->" in quick.picture for kind in KINDS)


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPU(s)")
def test_cuda_allocates_what_the_formulas_predict(tmp_path):
    ran = run_memory(tmp_path, **VISIBLE_GPUS)
    assert {row["device"] for row in ran.json["rows"]} == {"cuda"}
    check_measured(ran.json, megabytes=5, kinds_within=0.05, sum_within=0.05)
