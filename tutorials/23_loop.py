"""Train for two epochs with gradient accumulation. Print the learning rate at the end: 0.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml tutorials/23_loop.py
"""

import math

import torch
from accelerate import Accelerator
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

from accel_demo.processes.devices import use_cpu

EPOCHS, WINDOW, BATCH, LEARNING_RATE, CLIP_NORM = 2, 4, 8, 0.1, 5.0
SAMPLES = 80  # 10 micro-batches on one process, 5 on each of two: the last window is short


def make_data() -> TensorDataset:
    inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def train():
    """Return the accelerator, the trained model and the scheduler."""
    accelerator = Accelerator(
        cpu=use_cpu(),
        gradient_accumulation_steps=WINDOW,
        step_scheduler_with_optimizer=False,  # or the schedule would advance once per process
    )
    loader = accelerator.prepare(DataLoader(make_data(), BATCH))
    torch.manual_seed(0)  # the same weights on one process and on two
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    windows = math.ceil(len(loader) / WINDOW)  # optimizer steps per epoch
    scheduler = LinearLR(optimizer, 1.0, 0.0, total_iters=EPOCHS * windows)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    for _ in range(EPOCHS):
        for index, (inputs, targets) in enumerate(loader):
            start = index // WINDOW * WINDOW  # the first micro-batch of this window
            length = min(WINDOW, len(loader) - start)  # below WINDOW in a short last window
            with accelerator.accumulate(model):
                loss = mse_loss(model(inputs), targets)
                loss = loss * WINDOW / length
                accelerator.backward(loss)  # divides the loss by WINDOW
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
                optimizer.step()  # step() and zero_grad() do nothing until the window ends
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                scheduler.step()
    return accelerator, model, scheduler


def main() -> None:
    accelerator, _, scheduler = train()
    accelerator.print(f"Connected processes: {accelerator.num_processes}")
    accelerator.print(f"learning rate at the end: {scheduler.get_last_lr()[0]:g}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
