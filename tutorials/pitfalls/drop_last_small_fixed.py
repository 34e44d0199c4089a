"""Evaluate all samples of a small validation set.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/drop_last_small_fixed.py
"""

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader


def main():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(torch.rand(16, 1), batch_size=4, drop_last=True)
    valid_loader = DataLoader(torch.rand(6, 1), batch_size=4)
    model, optimizer, loader, valid_loader = accelerator.prepare(
        model, optimizer, loader, valid_loader
    )
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    evaluated = 0
    with torch.no_grad():
        for batch in valid_loader:
            evaluated += len(accelerator.gather_for_metrics(model(batch)))
    accelerator.print(f"{accelerator.num_processes} processes: {evaluated} of 6 samples evaluated")
    accelerator.end_training()


if __name__ == "__main__":
    main()
