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
    ranks = spawn(two_steps, 2)
    means = [rank.pop("mean loss") for rank in ranks]
    rows = [[name, *(f"{rank[name]:.4f}" for rank in ranks)] for name in ranks[0]]
    mean = sum(rank["loss of step 1"] for rank in ranks) / 2
    if means[0] != means[1] or abs(mean - means[0]) > 1e-5:
        raise RuntimeError("the processes are not connected")
    print("\n2 connected processes on cpu (gloo)\n")
    print(table(["", "rank 0", "rank 1"], rows))
    print(f"\nMean of the two losses: {means[0]:.4f}")


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


def two_steps() -> dict[str, float]:
    """Train for two steps. Return the first loss and values of a running mean of BatchNorm."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data_set = Subset(packaged_set("train"), range(40))
    loader = DataLoader(data_set, batch_size=10, sampler=DistributedSampler(data_set))
    net = models.resnet18(num_classes=10)
    net.conv1 = nn.Conv2d(1, 64, kernel_size=7, stride=2, padding=3, bias=False)
    running, at_start = dict(net.named_buffers())["bn1.running_mean"], []
    net.bn1.register_forward_pre_hook(lambda *_: at_start.append(running[0].item()))
    net = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    losses, at_end = [], []
    for images, labels in loader:
        loss = F.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        at_end.append(running[0].item())
    mean_loss = torch.tensor(losses[0]) / dist.get_world_size()
    dist.all_reduce(mean_loss)
    dist.destroy_process_group()
    return {
        "loss of step 1": losses[0],
        "running mean before step 1": at_start[0],
        "running mean after step 1": at_end[0],
        "running mean when step 2 reaches BatchNorm": at_start[1],
        "mean loss": mean_loss.item(),
    }


if __name__ == "__main__":
    with one_line_errors():
        main()
