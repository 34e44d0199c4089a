"""Create the packaged subset of Fashion-MNIST, with the same number of images of each class.

python accel_demo/assets/cut_subset.py FOLDER_WITH_THE_FOUR_IDX_FILES

Writes four gzipped idx files next to this script, and prints the SHA-256 digests of their
decompressed contents, to be copied to PACKAGED_SUMS in accel_demo/data.py. The same seed always
selects the same images. (`pytest -m system` creates the files again and compares them.)
"""

import gzip
import hashlib
import sys
from pathlib import Path

import torch

from accel_demo.data import read_idx

SEED = 2026
PER_CLASS = {"train": 1200, "t10k": 200}


def idx_bytes(tensor: torch.Tensor) -> bytes:
    """Encode a uint8 tensor as idx: 0, 0, 8 (uint8), number of dimensions, 4-byte sizes, data."""
    sizes = b"".join(size.to_bytes(4, "big") for size in tensor.shape)
    return bytes([0, 0, 8, tensor.dim()]) + sizes + tensor.numpy().tobytes()


def cut(source: Path, target: Path) -> None:
    """Write the subset of the dataset in the folder `source` to the folder `target`."""
    generator = torch.Generator().manual_seed(SEED)
    for split, per_class in PER_CLASS.items():
        images = read_idx(source, f"{split}-images-idx3-ubyte")
        labels = read_idx(source, f"{split}-labels-idx1-ubyte")
        order = torch.randperm(len(labels), generator=generator)
        chosen = torch.cat([order[labels[order] == label][:per_class] for label in range(10)])
        chosen = chosen[torch.randperm(len(chosen), generator=generator)]
        for name, tensor in (("images-idx3", images), ("labels-idx1", labels)):
            content = idx_bytes(tensor[chosen])
            path = target / f"{split}-{name}-ubyte.gz"
            path.write_bytes(gzip.compress(content, compresslevel=9, mtime=0))
            print(f'    "{path.stem}": "{hashlib.sha256(content).hexdigest()}",')


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python accel_demo/assets/cut_subset.py FOLDER_WITH_THE_FOUR_IDX_FILES")
    cut(Path(sys.argv[1]), Path(__file__).parent)
