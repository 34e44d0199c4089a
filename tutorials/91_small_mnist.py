"""Write a dataset with MNIST's file names and format, but only 40 images, so nothing is downloaded.

The images are the first of the packaged Fashion-MNIST images: clothes instead of digits.

python tutorials/91_small_mnist.py runs/small-mnist
"""

import gzip
import sys
from pathlib import Path

from accel_demo.data import ASSETS
from accel_demo.errors import UserError, one_line_errors

IMAGES = 40


def write(folder: Path) -> None:
    """Write the four files to `folder`/MNIST/raw, where `torchvision.datasets.MNIST` looks."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for split in ("train", "t10k"):
        # In the idx format, the number of entries is in bytes 4 to 7. The header of the image file
        # has 16 bytes, that of the label file 8. Each image takes 28 × 28 bytes, and each label 1.
        for kind, header, size in (("images-idx3", 16, 28 * 28), ("labels-idx1", 8, 1)):
            name = f"{split}-{kind}-ubyte"
            content = gzip.decompress((ASSETS / f"{name}.gz").read_bytes())
            number = IMAGES.to_bytes(4, "big")
            (raw / name).write_bytes(content[:4] + number + content[8 : header + IMAGES * size])


if __name__ == "__main__":
    with one_line_errors():
        if len(sys.argv) != 2:
            raise UserError("pass one folder, for example runs/small-mnist")
        write(Path(sys.argv[1]))
