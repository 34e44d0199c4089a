"""Prepare a scheduler for the steps of one process, which advances once per step.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/scheduler_prepared_fixed.py
"""

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader


def main():
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    set_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(torch.linspace(0, 1, 32)[:, None], batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 2 * len(loader)
    scheduler = accelerator.prepare(LinearLR(optimizer, 1.0, 0.0, total_iters=steps))
    rates = []
    for _ in range(2):
        for batch in loader:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            rates.append(scheduler.get_last_lr()[0])
    half, end = rates[steps // 2 - 1], rates[-1]
    accelerator.print(f"{accelerator.num_processes} processes: the learning rate is", end=" ")
    accelerator.print(f"{half:.3f} after {steps // 2} steps, {end:.3f} after {steps}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
