"""Test the confusion matrix and the most confident mistakes of a finished run."""

import base64
import io
import json

import pytest
import torch
from PIL import Image

from accel_demo import results, train_plain
from accel_demo.config import TrainConfig
from accel_demo.data import load_datasets
from accel_demo.models import make_model
from accel_demo.results import MOST_MISTAKES, predictions_of


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    train_plain.main(TrainConfig(max_steps=30, test_samples=500, run_dir=str(folder)))
    return folder


def test_the_confusion_matrix_counts_every_test_image_and_agrees_with_the_accuracy(run_dir):
    predictions = json.loads((run_dir / "predictions.json").read_text())
    summary = json.loads((run_dir / "summary.json").read_text())
    confusion = torch.tensor(predictions["confusion"])
    _, test_set = load_datasets(TrainConfig(test_samples=500))
    assert confusion.sum(dim=1).tolist() == torch.bincount(test_set.labels).tolist()
    assert confusion.trace().item() / 500 == summary["test_accuracy"]
    assert predictions["classes"] == list(test_set.class_names)


def test_the_most_confident_mistakes_come_first_with_their_images(run_dir):
    predictions = json.loads((run_dir / "predictions.json").read_text())
    _, test_set = load_datasets(TrainConfig(test_samples=500))
    mistakes = predictions["mistakes"]
    wrong = 500 - torch.tensor(predictions["confusion"]).trace().item()
    assert len(mistakes) == min(MOST_MISTAKES, wrong) > 1
    probabilities = [mistake["probability"] for mistake in mistakes]
    assert probabilities == sorted(probabilities, reverse=True)
    for mistake in mistakes:
        assert mistake["label"] == test_set.labels[mistake["index"]] != mistake["predicted"]
        image = Image.open(io.BytesIO(base64.b64decode(mistake["png"])))
        assert image.tobytes() == test_set.pixels[mistake["index"]].numpy().tobytes()


def test_saving_the_results_does_not_copy_the_weights(tmp_path, monkeypatch):
    config = TrainConfig(model="tiny_cnn", test_samples=8)
    weights = make_model(config).state_dict()
    addresses = []

    def record_addresses(model, test_set, *_):
        addresses.append({name: tensor.data_ptr() for name, tensor in model.state_dict().items()})
        return torch.zeros(len(test_set), 10)

    monkeypatch.setattr(results, "logits_of", record_addresses)
    _, test_set = load_datasets(config)
    results.save_results(tmp_path, weights, config, test_set, "no", torch.device("cpu"))
    assert addresses == [{name: tensor.data_ptr() for name, tensor in weights.items()}]


def test_color_images_are_saved_in_color_and_without_mistakes_the_list_is_empty():
    _, test_set = load_datasets(TrainConfig(dataset="synthetic", test_samples=8))
    test_set.pixels = test_set.pixels.expand(-1, -1, -1, 3).contiguous()
    right = torch.nn.functional.one_hot(test_set.labels, 10).float()
    assert predictions_of(right, test_set)["mistakes"] == []
    (mistake, *_) = predictions_of(right.roll(1, dims=1), test_set)["mistakes"]
    assert Image.open(io.BytesIO(base64.b64decode(mistake["png"]))).mode == "RGB"
