"""The training loop of the article this course started from, by itself.

python -m accel_demo.lab.bench.article_loop --steps 4 --seed 0

ResNet-101 in fp32 on the packaged images, read through torchvision image by image, in batches of
256. The last line it prints is what `accel-demo bench article` reads.
"""

import json
import time

import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_demo.errors import Parser, UserError, one_line_errors
from accel_demo.lab.bench.input import torchvision_set
from accel_demo.processes.connect import own_device

BATCH_SIZE = 256


def main(steps: int, seed: int) -> None:
    """Print, as JSON, images per second and the mean loss of the steps after the warm-up."""
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
    answer = {
        "images_per_second": images_seen / seconds,
        "loss": torch.stack(losses[warm_up:]).mean().item(),
        "device": device.type,
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(answer))


def make_model() -> nn.Module:
    """torchvision's ResNet-101 for ten classes, its first layer for one channel."""
    from torchvision import models

    model = models.resnet101(num_classes=10)
    model.conv1 = nn.Conv2d(1, 64, kernel_size=7, stride=2, padding=3, bias=False)
    return model


def warm_up_steps(steps: int) -> int:
    """How many of the first steps do not count: a sixth, from two to ten.

    Raises `UserError` where none is left to measure.
    """
    if steps < 3:
        raise UserError(f"--steps must be at least 3, got {steps}: the first two are warm-up")
    return min(max(2, steps // 6), 10)


def wait_for(device: torch.device) -> None:
    """A GPU works behind the host's back: before the clock is read, its work must be done."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


if __name__ == "__main__":
    with one_line_errors():
        parser = Parser(__doc__)
        parser.add_argument("--steps", type=int, default=4, help="three or more (default: 4)")
        parser.add_argument("--seed", type=int, default=0, help="weights and order (default: 0)")
        options = parser.parse_args()
        main(options.steps, options.seed)
