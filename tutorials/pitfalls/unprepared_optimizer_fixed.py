"""Accumulate gradients with a prepared optimizer, which waits for the last micro-batch.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/unprepared_optimizer_fixed.py
"""

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    loader = DataLoader(torch.linspace(0, 1, 32)[:, None], batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    weight = accelerator.unwrap_model(model).weight
    steps = int(optimizer.state[weight]["step"])
    weights = accelerator.gather(weight.detach())
    difference = (weights[0] - weights[1]).abs().item()
    accelerator.print(f"{len(loader)} micro-batches, {steps} steps")
    accelerator.print(f"{len(weights)} processes: their weights differ by {difference:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
