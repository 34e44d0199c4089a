"""Test the models' outputs and weights, and that the models can learn."""

import math

import pytest
import torch
import torch.nn.functional as F

from accel_demo.config import IMAGE_MODELS, TrainConfig
from accel_demo.data import load_datasets
from accel_demo.models import make_model


@pytest.mark.parametrize("dataset", ["fashion-mnist", "cifar10"])
@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_every_image_model_returns_ten_logits_per_image(name, dataset):
    model = make_model(TrainConfig(model=name, dataset=dataset)).eval()
    shape = (2, 3, 32, 32) if dataset == "cifar10" else (2, 1, 28, 28)
    assert model(torch.randn(shape)).shape == (2, 10)


@pytest.mark.parametrize("name", ["small_cnn", "tiny_cnn", "resnet18", "vgg11"])
def test_models_can_memorize_a_few_images(name):
    torch.manual_seed(0)
    config = TrainConfig(model=name, dataset="synthetic", train_samples=8, dropout=0.0)
    images, labels = load_datasets(config)[0].__getitems__(range(8))
    model = make_model(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2 if name == "tiny_cnn" else 1e-3)
    for _ in range(20 if name == "vgg11" else 10):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    assert F.cross_entropy(model(images), labels) < 1.0 < math.log(10)


def test_resnet101_is_the_model_of_the_article_with_one_channel():
    model = make_model(TrainConfig(model="resnet101"))
    assert tuple(model.conv1.weight.shape) == (64, 1, 7, 7)
    assert sum(parameter.numel() for parameter in model.parameters()) == 42_514_378


def test_vgg11_can_be_split_into_features_and_classifier():
    model = make_model(TrainConfig(model="vgg11")).eval()
    images = torch.randn(2, 1, 28, 28)
    features = model.features(F.pad(images, [2, 2, 2, 2]))
    assert features.shape == (2, 512)
    assert torch.equal(model.classifier(features), model(images))


def test_tiny_cnn_processes_each_image_independently():
    model = make_model(TrainConfig(model="tiny_cnn", dropout=0.0)).train()
    images = torch.randn(4, 1, 28, 28)
    torch.testing.assert_close(model(images)[:2], model(images[:2]))


def test_weights_are_channels_last():
    weight = make_model(TrainConfig()).get_submodule("4").weight
    assert weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last)
