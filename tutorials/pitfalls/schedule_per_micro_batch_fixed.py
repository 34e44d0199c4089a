"""Advance the scheduler in the last micro-batch of each step.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/schedule_per_micro_batch_fixed.py
"""

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(torch.linspace(0, 1, 32)[:, None], batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    scheduler = LinearLR(optimizer, 1.0, 0.0, total_iters=8)  # 2 epochs of 4 steps
    rates = []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    rates.append(scheduler.get_last_lr()[0])
    accelerator.print(f"{accelerator.num_processes} processes: the learning rate is", end=" ")
    accelerator.print(f"{rates[3]:.3f} after 4 steps, {rates[7]:.3f} after 8")
    accelerator.end_training()


if __name__ == "__main__":
    main()
