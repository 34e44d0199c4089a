"""Load the datasets into memory, and read batches of images from them.

A batch is a tuple `(images, labels)`. `images` is a normalized float32 tensor [B, C, H, W] in the
channels-last memory format, and `labels` is int64 [B]. (For batches of text, see text.py.)
"""

import gzip
import hashlib
import zlib
from array import array
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed.nn.functional  # noqa: F401 (before DDP does: see rendezvous.py)
from torch.utils.data import Dataset, TensorDataset

from accel_demo.config import TrainConfig
from accel_demo.errors import UserError
from accel_demo.text import TextSet

ASSETS = Path(__file__).parent / "assets"
MAX_SHIFT = 2  # augmentation shifts an image by at most this many pixels
FASHION_CLASSES = (
    "T-shirt/top Trouser Pullover Dress Coat Sandal Shirt Sneaker Bag Ankle-boot".split()
)
DIGITS = list("0123456789")
CIFAR_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()

# For each dataset: the class names, and the mean and standard deviation of each channel in the
# training images, with pixel values from 0 to 1. (The values for synthetic are arbitrary.)
STATISTICS = {
    "fashion-mnist-small": (FASHION_CLASSES, [0.2860], [0.3530]),
    "fashion-mnist": (FASHION_CLASSES, [0.2860], [0.3530]),
    "mnist": (DIGITS, [0.1307], [0.3081]),
    "cifar10": (CIFAR_CLASSES, [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
    "synthetic": (DIGITS, [0.5], [0.25]),
}
TORCHVISION_NAMES = {"fashion-mnist": "FashionMNIST", "mnist": "MNIST", "cifar10": "CIFAR10"}
# SHA-256 of the packaged files after decompression, as printed by cut_subset.py and cut_text.py.
PACKAGED_SUMS = {
    "train-images-idx3-ubyte": "013e0146a12ffe20bb15231b271b3de75cdf6392179a566b259e9e554ae50969",
    "train-labels-idx1-ubyte": "36e79d5689bd22c4e40dcd2e719eb4e07124df9e3b22384e8578b09b31a63206",
    "t10k-images-idx3-ubyte": "3e9b507a3cb1d1344415e149e61fdf784953c643c8b19df8d88ae3e60dff3985",
    "t10k-labels-idx1-ubyte": "9821ef487dcd05ed9346314c9f074d1cda0f8273407030954d974c72596fbaf8",
    "alice.txt": "7f620abb8c8af2938a140f46610ae5c1fb7fcb60a492906f2b1f0468ca5ffe16",
}
TEST_SHARE = 0.1  # the last part of the text, which is for testing
# SHA-256 of the decompressed Fashion-MNIST files. MNIST has different files with the same names.
FASHION_MNIST_SUMS = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}


def download(config: TrainConfig) -> None:
    """Download a full dataset to `config.data_dir` if its files are missing there.

    Call this in one process per machine. A failed download raises no error here, so that all
    processes raise the same error later, in `load_datasets`.
    """
    if config.dataset in TORCHVISION_NAMES and not _is_there(config):
        with suppress(OSError, RuntimeError):
            _torchvision_set(config, "train", download=True)


def load_datasets(
    config: TrainConfig, world_size: int | None = None
) -> tuple["ImageSet | TextSet", "ImageSet | TextSet"]:
    """Return the training set and the test set. Call `download` first if files may be missing.

    Raises `UserError` if a file is missing, truncated or altered, if the config requests more
    samples than the dataset has, or if there are too few training samples for one batch on each of
    `world_size` processes.
    """
    load = _load_text if config.dataset == "text" else load_images
    train_set, test_set = load(config)
    needed = config.batch_size * (world_size or 0)
    if len(train_set) < needed:
        raise UserError(
            f"one batch per process needs {needed} training {config.sample}s, but there are only "
            f"{len(train_set)}. Use a smaller --batch-size."
        )
    return train_set, test_set


def load_images(config: TrainConfig) -> tuple["ImageSet", "ImageSet"]:
    """Return the training images and the test images, as `load_datasets` does."""
    train_set = _load_split(config, "train", config.train_samples, config.augment)
    return train_set, _load_split(config, "test", config.test_samples, augment=False)


def packaged_set(split: str) -> TensorDataset:
    """Return the packaged "train" or "test" images, float32 [N, 1, 28, 28], and labels, int64 [N].

    This is for short programs. Training runs use `load_datasets`, which is faster.
    """
    images, labels = _read_split(ASSETS, split, PACKAGED_SUMS)
    _, (mean,), (std,) = STATISTICS["fashion-mnist-small"]
    return TensorDataset((images / 255 - mean) / std, labels.long())


class ImageSet(Dataset):
    """The images and labels of one split, kept in memory as two tensors and read in batches.

    `images` is uint8 [N, C, H, W] and `labels` is int64 [N]. `mean` and `std` contain one number
    per channel. If `augment` is true, each image is randomly shifted by up to `MAX_SHIFT` pixels
    and flipped with probability 0.5. `set_epoch` draws the shifts and flips from the seed and the
    epoch, so that they do not depend on the number of processes or loader workers.
    """

    def __init__(self, images, labels, class_names, mean, std, augment=False, seed=0):
        self.pixels = images.permute(0, 2, 3, 1).contiguous()  # [N, H, W, C]: channels last
        self.labels = labels
        self.class_names = class_names
        self.mean = 255 * torch.tensor(mean).view(1, -1, 1, 1)
        self.scale = 1 / (255 * torch.tensor(std).view(1, -1, 1, 1))
        self.augment = augment
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw a random shift and flip for each image in this epoch."""
        if not self.augment:
            return
        generator = torch.Generator().manual_seed(self.seed + epoch)
        shape = (len(self), 2)  # for each image, the (top, left) corner of the crop
        self.corners = torch.randint(0, 2 * MAX_SHIFT + 1, shape, generator=generator)
        self.mirrored = torch.rand(len(self), generator=generator) < 0.5

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a whole batch at once. DataLoader calls this method instead of `__getitem__`."""
        chosen = torch.frombuffer(array("q", indices), dtype=torch.int64)
        images = self.pixels.index_select(0, chosen).permute(0, 3, 1, 2)  # view [B, C, H, W]
        if self.augment:
            images = self._shifted(images, chosen)
        return images.float().sub_(self.mean).mul_(self.scale), self.labels.index_select(0, chosen)

    def _shifted(self, images: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        height, width = images.shape[2:]
        padded = torch.nn.functional.pad(images, [MAX_SHIFT] * 4)
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # view [B, C, 5, 5, H, W]
        top, left = self.corners[chosen].unbind(1)
        images = windows[torch.arange(len(chosen)), :, top, left]
        images = torch.where(self.mirrored[chosen, None, None, None], images.flip(3), images)
        return images.contiguous(memory_format=torch.channels_last)


def read_idx(folder: Path, name: str, sums: dict[str, str] | None = None) -> torch.Tensor:
    """Return the uint8 tensor from the idx file `folder/name` or `folder/name.gz`.

    `sums` maps file names to SHA-256 digests of the decompressed files. Raises `UserError` if the
    file is missing, truncated or altered.
    Format: http://yann.lecun.com/exdb/mnist/
    """
    content = _read_file(folder, name, sums)
    header_size = 4 + 4 * content[3] if len(content) > 3 else 0
    sizes = [int.from_bytes(content[i : i + 4], "big") for i in range(4, header_size, 4)]
    data = torch.frombuffer(bytearray(content[header_size:]) or bytearray(1), dtype=torch.uint8)
    if content[:3] != b"\0\0\x08" or data.numel() != torch.Size(sizes).numel():
        raise UserError(
            f"{folder / name} is truncated, or not a uint8 idx file. {_copy_again(folder)}"
        )
    return data.view(sizes)


def _read_file(folder: Path, name: str, sums: dict[str, str] | None) -> bytes:
    """Return the content of `folder/name` or, decompressed, of `folder/name.gz`: see `read_idx`."""
    path = folder / name
    again = _copy_again(folder)
    if not path.exists():
        path = folder / f"{name}.gz"
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    except FileNotFoundError:
        advice = again if folder == ASSETS else "Pass its folder with --data-dir."
        raise UserError(f"{path} is missing. {advice}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({error}). {again}") from None
    if sums is not None and hashlib.sha256(content).hexdigest() != sums[name]:
        raise UserError(f"{path} is not the original file: its checksum differs. {again}")
    return content


def _copy_again(folder: Path) -> str:
    return "Install accel-demo again." if folder == ASSETS else "Copy it again."


def _load_text(config: TrainConfig) -> tuple[TextSet, TextSet]:
    text = _read_file(ASSETS, "alice.txt", PACKAGED_SUMS).decode("ascii")
    end = round(len(text) * (1 - TEST_SHARE))
    train_set, test_set = TextSet(text[:end]), TextSet(text[end:])
    for split, part, samples in (
        ("train", train_set, config.train_samples),
        ("test", test_set, config.test_samples),
    ):
        _check_samples(config, split, samples, len(part))
        part.inputs, part.labels = part.inputs[: samples or None], part.labels[: samples or None]
    return train_set, test_set


def _load_split(config: TrainConfig, split: str, samples: int, augment: bool) -> ImageSet:
    class_names, mean, std = STATISTICS[config.dataset]
    if config.dataset == "synthetic":
        images, labels = _synthetic(split, samples)
    elif config.dataset == "fashion-mnist-small":
        images, labels = _read_split(ASSETS, split, PACKAGED_SUMS)
    elif not _is_there(config):
        raise UserError(
            f"{config.dataset} is not in {config.data_dir} and could not be downloaded. "
            "Check the network connection, or pass its folder with --data-dir."
        )
    elif config.dataset == "cifar10":
        images, labels = _read_cifar10(config, split)
    else:
        sums = FASHION_MNIST_SUMS if config.dataset == "fashion-mnist" else None
        images, labels = _read_split(_idx_folder(config), split, sums)
    _check_samples(config, split, samples, len(labels))
    samples = samples or len(labels)
    images, labels = images[:samples], labels[:samples].long()
    return ImageSet(images, labels, class_names, mean, std, augment, config.seed)


def _check_samples(config: TrainConfig, split: str, samples: int, available: int) -> None:
    """Raise `UserError` if the config requests more samples than the dataset has."""
    if samples > available:
        raise UserError(
            f"{split}_samples is {samples}, but {config.dataset} has {available} {split} "
            f"{config.sample}s"
        )


def _read_split(
    folder: Path, split: str, sums: dict[str, str] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    prefix = {"train": "train", "test": "t10k"}[split]
    images = read_idx(folder, f"{prefix}-images-idx3-ubyte", sums)
    labels = read_idx(folder, f"{prefix}-labels-idx1-ubyte", sums)
    if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1] or labels.max() > 9:
        raise UserError(
            f"the {prefix}-* files in {folder} do not belong together. Copy them again."
        )
    return images.unsqueeze(1), labels


def _read_cifar10(config: TrainConfig, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        full = _torchvision_set(config, split)
    except (OSError, RuntimeError):  # raised by torchvision, for example if a checksum is wrong
        raise UserError(f"cifar10 in {config.data_dir} is damaged. Delete its files.") from None
    return torch.as_tensor(full.data).permute(0, 3, 1, 2), torch.as_tensor(full.targets)


def _is_there(config: TrainConfig) -> bool:
    """Return True if the files of the dataset exist, without checking them for damage."""
    if config.dataset == "cifar10":
        return Path(config.data_dir, "cifar-10-batches-py").is_dir()
    folder = _idx_folder(config)
    return folder == Path(config.data_dir) or all(
        (folder / name).exists() for name in FASHION_MNIST_SUMS
    )


def _idx_folder(config: TrainConfig) -> Path:
    """Return the folder of the idx files: `data_dir` or the subfolder that torchvision creates."""
    folder = Path(config.data_dir)
    if config.dataset == "fashion-mnist" and any(folder.glob("*-ubyte*")):
        return folder
    return folder / TORCHVISION_NAMES[config.dataset] / "raw"


def _torchvision_set(config: TrainConfig, split: str, download: bool = False):
    from torchvision import datasets  # imported here, because the import is slow and rarely needed

    kind = getattr(datasets, TORCHVISION_NAMES[config.dataset])
    return kind(config.data_dir, train=split == "train", download=download)


def _synthetic(split: str, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images of noise with a bright patch, and labels that encode the patch's position."""
    samples = samples or {"train": 2048, "test": 512}[split]
    if samples > 1_000_000:
        raise UserError(f"{split}_samples must be at most 1000000 for synthetic, got {samples}")
    generator = torch.Generator().manual_seed({"train": 1, "test": 2}[split])
    images = torch.randint(0, 128, (samples, 1, 28, 28), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (samples,), generator=generator)
    rows = torch.arange(28).view(1, 1, 28, 1) // 14 == (labels % 2).view(-1, 1, 1, 1)
    columns = torch.arange(28).view(1, 1, 1, 28) // 6 == (labels // 2).view(-1, 1, 1, 1)
    return images + 120 * (rows & columns).byte(), labels
