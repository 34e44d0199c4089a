"""A finished run tells which classes its model mixes up, and which mistakes it was surest of."""

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


def test_the_confusion_matrix_has_every_test_image_and_the_accuracy_of_the_run(run_dir):
    found = json.loads((run_dir / "predictions.json").read_text())
    summary = json.loads((run_dir / "summary.json").read_text())
    confusion = torch.tensor(found["confusion"])
    _, test_set = load_datasets(TrainConfig(test_samples=500))
    assert confusion.sum(dim=1).tolist() == torch.bincount(test_set.labels).tolist()
    assert confusion.trace().item() / 500 == summary["test_accuracy"]
    assert found["classes"] == list(test_set.class_names)


def test_the_surest_mistakes_come_first_with_their_images(run_dir):
    found = json.loads((run_dir / "predictions.json").read_text())
    _, test_set = load_datasets(TrainConfig(test_samples=500))
    mistakes = found["mistakes"]
    wrong = 500 - torch.tensor(found["confusion"]).trace().item()
    assert len(mistakes) == min(MOST_MISTAKES, wrong) > 1
    probabilities = [mistake["probability"] for mistake in mistakes]
    assert probabilities == sorted(probabilities, reverse=True)
    for mistake in mistakes:
        assert mistake["label"] == test_set.labels[mistake["index"]] != mistake["predicted"]
        image = Image.open(io.BytesIO(base64.b64decode(mistake["png"])))
        assert image.tobytes() == test_set.pixels[mistake["index"]].numpy().tobytes()


def test_the_weights_are_saved_without_a_second_copy_of_them(tmp_path, monkeypatch):
    config = TrainConfig(model="tiny_cnn", test_samples=8)
    weights = make_model(config).state_dict()
    (tmp_path / "environment.json").write_text('{"mixed_precision": "no"}')
    asked = []

    def listen(model, test_set, *_):
        asked.append({name: tensor.data_ptr() for name, tensor in model.state_dict().items()})
        return torch.zeros(len(test_set), 10)

    monkeypatch.setattr(results, "logits_of", listen)
    _, test_set = load_datasets(config)
    results.save_results(tmp_path, weights, config, test_set, torch.device("cpu"))
    assert asked == [{name: tensor.data_ptr() for name, tensor in weights.items()}]


def test_coloured_images_are_kept_in_colour_and_no_mistake_is_no_list():
    _, test_set = load_datasets(TrainConfig(dataset="synthetic", test_samples=8))
    test_set.pixels = test_set.pixels.expand(-1, -1, -1, 3).contiguous()
    right = torch.nn.functional.one_hot(test_set.labels, 10).float()
    assert predictions_of(right, test_set)["mistakes"] == []
    (mistake, *_) = predictions_of(right.roll(1, dims=1), test_set)["mistakes"]
    assert Image.open(io.BytesIO(base64.b64decode(mistake["png"]))).mode == "RGB"
