"""Compare how fast train.py and torchvision load the same images.

python benchmarks/input.py

Both load the 12,000 packaged training images in shuffled batches of 128, with one thread per
process. train.py processes a whole batch at once, whereas torchvision's FashionMNIST applies
ToTensor and Normalize to each image. DataLoader workers load one epoch before the clock starts, so
that their start-up time is not measured.
"""

import time
from argparse import Namespace
from functools import partial

import torch
from baseline import TorchvisionSet
from measuring import in_turns, main
from torch.utils.data import DataLoader

from accel_demo.anatomy.gil import one_torch_thread
from accel_demo.batches import loader_options
from accel_demo.config import TrainConfig
from accel_demo.data import load_images
from accel_demo.lab.measurements import Report, Table

REPEATS = 5
BATCH_SIZE = 128
LEAST_SECONDS = 0.3  # per measurement, because one epoch of our loader is too short to time
OURS, TORCHVISION = "ours, 0 workers", "torchvision, 0 workers"


def measure(options: Namespace) -> Report:
    with one_torch_thread():
        loaders = make_loaders()
        for loader in loaders.values():  # fork the workers before this process starts threads
            list(loader)
        sides = {name: partial(images_per_second, loaders[name]) for name in loaders}
        rates = in_turns(sides, options.repeats, "reading")
    table = Table("Reading images", "images/s", rates, reference=TORCHVISION, digits=0)
    shape = "float32 [128, 1, 28, 28]"  # `make_loaders` compares the batches
    finding = f"Both deliver the same: their first batches, {shape}, agree to rounding."
    return Report([table], [finding])


def make_loaders() -> dict[str, DataLoader]:
    """Return {table row: DataLoader}. Every loader reads the packaged training images.

    Raises `AssertionError` if the first batches of the two datasets differ.
    """
    shuffled = {"batch_size": BATCH_SIZE, "shuffle": True}
    options = loader_options(TrainConfig(), torch.device("cpu"))
    ours, augmented = (load_images(TrainConfig(augment=augment))[0] for augment in (False, True))
    theirs = TorchvisionSet(ours.pixels[..., 0], ours.labels)
    first_batch = tuple(next(iter(DataLoader(theirs, BATCH_SIZE))))
    torch.testing.assert_close(ours.__getitems__([*range(BATCH_SIZE)]), first_batch)
    alive = {**shuffled, "persistent_workers": True}
    return {
        OURS: DataLoader(ours, **shuffled, drop_last=True, **options),
        f"{OURS}, augmented": DataLoader(augmented, **shuffled, drop_last=True, **options),
        TORCHVISION: DataLoader(theirs, **shuffled),
        "torchvision, 1 worker": DataLoader(theirs, **alive, num_workers=1),
        "torchvision, 2 workers": DataLoader(theirs, **alive, num_workers=2),
    }


def images_per_second(loader: DataLoader, _: int) -> float:
    """Read whole epochs for at least `LEAST_SECONDS`, including the creation of their iterators."""
    images, seconds, started_at = 0, 0.0, time.perf_counter()
    while seconds < LEAST_SECONDS:
        images += sum(len(labels) for _, labels in loader)
        seconds = time.perf_counter() - started_at
    return images / seconds


if __name__ == "__main__":
    main()
