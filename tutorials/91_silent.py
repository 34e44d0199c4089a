"""Measure mistakes of 91_old.py that cause no error: python tutorials/91_silent.py"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import models
from torchvision.transforms import Normalize

from accel_demo.data import ASSETS, packaged_set, read_idx
from accel_demo.errors import one_line_errors
from accel_demo.processes.launch import spawn
from accel_demo.show import table


def main() -> None:
    print(table(["after", "minimum", "maximum", "mean", "standard deviation"], pixel_statistics()))
    losses, means = zip(*spawn(first_loss, 2), strict=True)
    if means[0] != means[1] or abs(sum(losses) / 2 - means[0]) > 1e-5:
        raise RuntimeError("the processes are not connected")
    head = ["connected processes", "loss on rank 0", "loss on rank 1", "mean of both"]
    row = [len(losses), *(f"{loss:.4f}" for loss in (*losses, means[0]))]
    print(f"\n{table(head, [row])}")


def pixel_statistics() -> list[list[str]]:
    """Return statistics of the packaged training images for each transform."""
    pixels = read_idx(ASSETS, "train-images-idx3-ubyte").unsqueeze(1) / 255  # as ToTensor does
    mean, std = round(pixels.mean().item(), 3), round(pixels.std().item(), 3)
    rows = []
    for name, images in (
        ("`ToTensor()`", pixels),
        ("`Normalize((0.5,), (1.0,))`", Normalize((0.5,), (1.0,))(pixels)),
        (f"`Normalize(({mean},), ({std},))`", Normalize((mean,), (std,))(pixels)),
    ):
        values = (images.min(), images.max(), images.mean(), images.std())
        rows.append([name, *(f"{value.item():.2f}".replace("-0.00", "0.00") for value in values)])
    return rows


def first_loss() -> tuple[float, float]:
    """Return this rank's loss in the first training step, and the mean over the ranks."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data_set = Subset(packaged_set("train"), range(40))
    loader = DataLoader(data_set, batch_size=10, sampler=DistributedSampler(data_set))
    net = models.resnet18(num_classes=10)
    net.conv1 = nn.Conv2d(1, 64, kernel_size=7, stride=2, padding=3, bias=False)
    images, labels = next(iter(loader))
    loss = F.cross_entropy(DistributedDataParallel(net)(images), labels).item()
    mean = torch.tensor(loss) / dist.get_world_size()
    dist.all_reduce(mean)
    dist.destroy_process_group()
    return loss, mean.item()


if __name__ == "__main__":
    with one_line_errors():
        main()
