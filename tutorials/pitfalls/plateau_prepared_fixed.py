"""Use a `ReduceLROnPlateau` that isn't prepared, and receives each loss once.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/plateau_prepared_fixed.py
"""

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(torch.linspace(0, 1, 16)[:, None], batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    scheduler = ReduceLROnPlateau(optimizer, patience=1)  # at the second bad loss in a row
    rates = []
    for validation_loss in (0.9, 0.8, 0.8, 0.7):  # a bad epoch follows a good one
        for batch in loader:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step(validation_loss)
        rates.append(optimizer.param_groups[0]["lr"])
    rates = ", ".join(f"{rate:.2f}" for rate in rates)
    accelerator.print(f"{accelerator.num_processes} processes: learning rates {rates}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
