"""Train like PyTorch's MNIST example, as the baseline of `accel-demo bench accuracy`.

python -m accel_demo.lab.bench.baseline --data-dir /usr/share/datasets/fashion-mnist --seed 0

The model, optimizer, learning rates, batch sizes and number of epochs are the same as in
https://github.com/pytorch/examples/blob/main/mnist/main.py. Unlike the example, this program
trains on Fashion-MNIST, normalized with the mean and standard deviation of Fashion-MNIST. It always
shuffles the images, whereas the example shuffles them only on a GPU. It stops after the first epoch
in which the test accuracy reaches the highest target.
"""

import gzip
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset
from torchvision import datasets, transforms
from tqdm import tqdm

from accel_demo.data import FASHION_MNIST_SUMS, read_idx
from accel_demo.errors import UserError, one_line_errors
from accel_demo.options import Parser

EPOCHS = 14
BATCH_SIZE, EVAL_BATCH_SIZE = 64, 1000
MEAN, STD = (0.2860,), (0.3530,)


def main() -> None:
    parser = Parser(__doc__, prog="python -m accel_demo.lab.bench.baseline")
    parser.add_argument("--data-dir", type=Path, required=True, help="folder with Fashion-MNIST")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    help = "target accuracies, such as 0.92; training stops when the highest is reached"
    parser.add_argument("--targets", type=float, nargs="+", default=[0.9, 0.92], help=help)
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="maximum number of epochs")
    help = "train on only the first N images; 0 means all"
    parser.add_argument("--train-samples", type=int, default=0, metavar="N", help=help)
    help = "write environment.json and metrics.jsonl to this folder, like train.py"
    parser.add_argument("--run-dir", type=Path, metavar="FOLDER", help=help)
    options = parser.parse_args()
    with torchvision_folder(options.data_dir) as folder:
        train(options, folder)


def train(options, folder: Path) -> None:
    """Train, and print the test accuracy after every epoch. `--run-dir` also writes it."""
    torch.manual_seed(options.seed)
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    train_set = datasets.FashionMNIST(folder, train=True, transform=transform)
    test_set = datasets.FashionMNIST(folder, train=False, transform=transform)
    if options.train_samples:
        train_set = Subset(train_set, range(options.train_samples))
    train_loader = DataLoader(train_set, BATCH_SIZE, shuffle=True)
    test_loader = DataLoader(test_set, EVAL_BATCH_SIZE)
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)

    threads = torch.get_num_threads()
    environment = {"processes": 1, "device": "cpu", "threads_per_process": threads}
    append_json(options.run_dir, "environment.json", environment)
    print(f"first step, threads: {threads}", flush=True)
    for epoch in range(1, options.epochs + 1):
        model.train()
        for images, labels in tqdm(train_loader, f"epoch {epoch}", unit="batch", leave=False):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        scheduler.step()
        accuracy = evaluate(model, test_loader)
        append_json(options.run_dir, "metrics.jsonl", {"epoch": epoch, "test_accuracy": accuracy})
        print(f"epoch {epoch}: test accuracy {accuracy:.4f}", flush=True)
        if accuracy >= max(options.targets):
            break


def append_json(folder: Path | None, name: str, values: dict) -> None:
    """Append a line to a JSON file in the folder, if there is a folder."""
    if folder:
        with open(folder / name, "a") as file:
            file.write(json.dumps(values) + "\n")


class Net(nn.Sequential):
    """The model from PyTorch's example, without log_softmax: `F.cross_entropy` applies that."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(9216, 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, 10),
        )


@torch.no_grad()
def evaluate(model: nn.Module, test_loader: DataLoader) -> float:
    """Return the fraction of test images that the model classifies correctly."""
    model.eval()
    correct = count = 0
    for images, labels in test_loader:
        correct += int((model(images).argmax(1) == labels).sum())
        count += len(labels)
    return correct / count


@contextmanager
def torchvision_folder(data_dir: Path) -> Iterator[Path]:
    """Yield a folder that torchvision can read, with uncompressed files in FashionMNIST/raw.

    The folder is `data_dir` if it already contains these files, otherwise a temporary folder.
    """
    source = idx_folder(data_dir)
    raw = Path("FashionMNIST", "raw")
    if source == data_dir / raw and all((source / name).exists() for name in FASHION_MNIST_SUMS):
        yield data_dir
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, raw).mkdir(parents=True)
        for name in FASHION_MNIST_SUMS:
            read_idx(source, name)  # raises `UserError` if the file is damaged
            if (source / name).exists():
                shutil.copyfile(source / name, Path(folder, raw, name))
            else:
                content = gzip.decompress((source / f"{name}.gz").read_bytes())
                Path(folder, raw, name).write_bytes(content)
        yield Path(folder)


def idx_folder(data_dir: Path) -> Path:
    """Return the folder that contains the four idx files, compressed or not.

    The folder is `data_dir` or its subfolder FashionMNIST/raw. Raises `UserError` if neither
    contains all four files.
    """
    for folder in (data_dir, data_dir / "FashionMNIST" / "raw"):
        files = {path.name.removesuffix(".gz") for path in folder.glob("*-ubyte*")}
        if files >= FASHION_MNIST_SUMS.keys():
            return folder
    code = "from torchvision.datasets import FashionMNIST as F; F('data', download=True)"
    raise UserError(
        f"Fashion-MNIST is not in {data_dir}: on Debian run "
        "`apt-get install dataset-fashion-mnist`, then add --data-dir "
        "/usr/share/datasets/fashion-mnist. Elsewhere run "
        f'`python -c "{code}"`, then add --data-dir data.'
    )


if __name__ == "__main__":
    with one_line_errors():
        main()
