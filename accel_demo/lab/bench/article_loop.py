"""Train ResNet-101 with the training loop from the article that inspired this course.

python -m accel_demo.lab.bench.article_loop --steps 4 --seed 0

The loop trains in fp32 on batches of 256 packaged images, which torchvision reads one by one. The
program's last output line is the result as JSON, which `accel-demo bench article` reads.
"""

import json
import time
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_demo.errors import UserError, one_line_errors
from accel_demo.lab.bench.input import torchvision_set
from accel_demo.lab.bench.limit import wait_for
from accel_demo.options import Parser
from accel_demo.processes.devices import own_device

BATCH_SIZE = 256


@dataclass(frozen=True)
class LoopResult:
    """Speed and mean loss of a run after its warm-up, and the device and threads that it used."""

    images_per_second: float
    mean_loss: float
    device: str
    threads: int


def train(steps: int, seed: int) -> LoopResult:
    warm_up = warm_up_steps(steps)
    device = own_device()
    torch.manual_seed(seed)
    train_set = torchvision_set((0.5,), (1.0,))
    train_loader = DataLoader(train_set, BATCH_SIZE, shuffle=True)
    model = make_model().to(device)
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    step, images_seen, losses = 0, 0, []
    model.train()
    while step < steps:
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = loss_function(model(images), labels)
            loss.backward()
            optimizer.step()
            step += 1
            losses.append(loss.detach())
            images_seen += len(labels)
            if step % 10 == 0:
                print(f"step {step}: loss {loss.item():.4f}")
            if step == warm_up:
                wait_for(device)
                images_seen, started_at = 0, time.perf_counter()
            if step == steps:
                break
    wait_for(device)
    seconds = time.perf_counter() - started_at
    mean_loss = torch.stack(losses[warm_up:]).mean().item()
    return LoopResult(images_seen / seconds, mean_loss, device.type, torch.get_num_threads())


def make_model() -> nn.Module:
    """Return torchvision's ResNet-101, adapted to ten classes and one-channel images."""
    from torchvision import models

    model = models.resnet101(num_classes=10)
    model.conv1 = nn.Conv2d(1, 64, kernel_size=7, stride=2, padding=3, bias=False)
    return model


def warm_up_steps(steps: int) -> int:
    """Return the number of warm-up steps: a sixth of all steps, but at least two and at most ten.

    Raises `UserError` if all steps would be warm-up steps.
    """
    if steps < 3:
        raise UserError(f"--steps must be at least 3, got {steps}: the first two are warm-up")
    return min(max(2, steps // 6), 10)


if __name__ == "__main__":
    with one_line_errors():
        parser = Parser(__doc__)
        parser.add_argument("--steps", type=int, default=4, help="steps to train (default: 4)")
        parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
        options = parser.parse_args()
        print(json.dumps(asdict(train(options.steps, options.seed))))
