"""Prepare the optimizer and the loader, but not the model, whose gradients are then not averaged.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/not_wrapped_broken.py
"""

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = DataLoader(torch.linspace(0, 1, 16)[:, None], batch_size=2, shuffle=True)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    for batch in loader:
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    weights = accelerator.gather(accelerator.unwrap_model(model).weight.detach())
    difference = (weights[0] - weights[1]).abs().max()
    accelerator.print(f"{len(weights)} processes: their weights differ by {difference:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
