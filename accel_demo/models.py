"""The models. Each takes images [B, C, H, W] and returns logits [B, 10].

For the exception, which takes and predicts characters, see tiny_gpt.py.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from accel_demo.config import TrainConfig
from accel_demo.tiny_gpt import TinyGPT

CLASSES = 10


def make_model(config: TrainConfig) -> nn.Module:
    """Return the model `config.model` for `config.dataset`, in channels-last memory format.

    If `config.compile` is set, the first forward pass compiles the model.
    """
    channels, size = (3, 32) if config.dataset == "cifar10" else (1, 28)
    if config.model == "small_cnn":
        model = small_cnn(channels, size, config.dropout)
    elif config.model == "tiny_cnn":
        model = tiny_cnn(channels, size, config.dropout)
    elif config.model == "tiny_gpt":
        model = TinyGPT(config.dropout)
    elif config.model == "vgg11":
        model = VGG11(channels, config.dropout)
    else:
        model = resnet(config.model, channels)
    model = model.to(memory_format=torch.channels_last)
    if config.compile:
        model.compile()
    return model


def small_cnn(channels: int, size: int, dropout: float) -> nn.Sequential:
    """Return the default model. Each of its three stages halves the height and the width."""
    return nn.Sequential(
        nn.Conv2d(channels, 24, kernel_size=3, padding=1, bias=False),
        nn.MaxPool2d(2),  # pool first, so that the batch norm processes only 1/4 of the values
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Conv2d(24, 64, kernel_size=3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 128, kernel_size=3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(128),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(128 * math.ceil(size / 8) ** 2, CLASSES),
    )


def tiny_cnn(channels: int, size: int, dropout: float) -> nn.Sequential:
    """Return a model without batch norm, so that images in a batch do not affect each other."""
    return nn.Sequential(
        nn.Conv2d(channels, 8, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(16 * math.ceil(size / 4) ** 2, CLASSES),
    )


def resnet(name: str, channels: int) -> nn.Module:
    """Return torchvision's resnet18 or resnet101 for ten classes and `channels` input channels."""
    from torchvision import models  # imported here, because the import is slow and rarely needed

    model = getattr(models, name)(num_classes=CLASSES)
    if channels != 3:
        model.conv1 = nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
    return model


class VGG11(nn.Module):
    """VGG configuration A for 32×32 images. Smaller images are padded to this size.

    Five pooling layers reduce a 32×32 image to one pixel with 512 channels, so the classifier is
    smaller than in the paper.
    Source: Simonyan and Zisserman, 2014, https://arxiv.org/abs/1409.1556
    """

    def __init__(self, channels: int, dropout: float):
        super().__init__()
        layers: list[nn.Module] = []
        for outputs in (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512):
            if outputs == "pool":
                layers.append(nn.MaxPool2d(2))
            else:
                layers += [nn.Conv2d(channels, outputs, kernel_size=3, padding=1), nn.ReLU()]
                channels = outputs
        self.features = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten())
        self.classifier = nn.Sequential(
            nn.Linear(512, 512), nn.ReLU(), nn.Dropout(dropout), nn.Linear(512, CLASSES)
        )
        for layer in self.modules():  # VGG11 does not learn with PyTorch's default initialization
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)  # pyright: ignore[reportArgumentType] (it has a bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        missing = 32 - images.shape[-1]
        images = F.pad(images, [missing // 2, missing - missing // 2] * 2)
        return self.classifier(self.features(images))
