"""Profile four steps of a training loop, and write one trace per rank to runs/profile.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml tutorials/40_profile.py
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import ProfileKwargs
from torch import nn
from torch.utils.data import DataLoader

from accel_demo.data import packaged_set


def main():
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    loader = DataLoader(packaged_set("train"), batch_size=64, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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
