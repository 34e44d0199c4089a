"""Train like PyTorch's MNIST example, as the baseline of accuracy.py, which starts this program.

The model, optimizer, learning rates, batch sizes and number of epochs are the same as in
https://github.com/pytorch/examples/blob/main/mnist/main.py. Unlike the example, this program
trains on Fashion-MNIST, normalized with the mean and standard deviation of Fashion-MNIST. It always
shuffles the images, whereas the example shuffles them only on a GPU. It stops after the first epoch
in which the test accuracy reaches the target.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms
from tqdm import tqdm

from accel_demo.errors import one_line_errors
from accel_demo.options import Parser

EPOCHS = 14
BATCH_SIZE, EVAL_BATCH_SIZE = 64, 1000
MEAN, STD = (0.2860,), (0.3530,)


class TorchvisionSet(datasets.FashionMNIST):
    """torchvision's dataset, but with images uint8 [N, 28, 28] that are already in memory."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, mean=MEAN, std=STD):
        normalize = [transforms.ToTensor(), transforms.Normalize(mean, std)]
        self.data, self.targets = images, labels
        self.transform, self.target_transform = transforms.Compose(normalize), None


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("images", help="file with the images and labels of both sets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="maximum number of epochs")
    parser.add_argument("--target", type=float, default=0.92, help="test accuracy to reach")
    parser.add_argument("--run-dir", type=Path, required=True, help="folder for the results")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    train_set, test_set = (TorchvisionSet(*tensors) for tensors in torch.load(options.images))
    train_loader = DataLoader(train_set, BATCH_SIZE, shuffle=True)
    test_loader = DataLoader(test_set, EVAL_BATCH_SIZE)
    model = make_model()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)

    environment = {"processes": 1, "device": "cpu", "threads_per_process": torch.get_num_threads()}
    (options.run_dir / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    for epoch in range(1, options.epochs + 1):
        model.train()
        bar = tqdm(train_loader, f"epoch {epoch}", unit="batch", leave=False, disable=None)
        for images, labels in bar:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            hits = [(model(images).argmax(1) == labels).sum() for images, labels in test_loader]
        accuracy = int(sum(hits)) / len(test_set)
        metrics = json.dumps({"test_accuracy": accuracy})
        (options.run_dir / "metrics.jsonl").write_text(f"{metrics}\n", encoding="utf-8")
        if accuracy >= options.target:
            break


def make_model() -> nn.Module:
    """Return the example's model, without log_softmax: `F.cross_entropy` applies that."""
    convolutions = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()]
    pooling = [nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten()]
    classifier = [nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)]
    return nn.Sequential(*convolutions, *pooling, *classifier)


if __name__ == "__main__":
    with one_line_errors():
        main()
