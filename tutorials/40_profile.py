"""Profile four steps of 40_train.py, and write one trace per rank to runs/profile.

torchrun --standalone --nproc-per-node 2 tutorials/40_profile.py
"""

import time

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import ProfileKwargs
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __init__(self, seconds: float):
        self.seconds = seconds  # per image, to read it from the disk

    def __len__(self):
        return 2048

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.full((3, 32, 32), index / 2048), index % 10


def main():
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    data = Images(seconds=0.002 if accelerator.process_index == 1 else 0)
    loader = DataLoader(data, batch_size=16, shuffle=True)
    layers = nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(32 * 28 * 28, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    profiling = ProfileKwargs(
        # Skip 3 steps, let the profiler warm up for 1 step, then record 4 steps, once.
        schedule_option={"skip_first": 3, "wait": 0, "warmup": 1, "active": 4, "repeat": 1},
        output_trace_dir="runs/profile",
    )
    with accelerator.profile(profiling) as profiler:
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()  # the training step has ended
    accelerator.end_training()


if __name__ == "__main__":
    main()
