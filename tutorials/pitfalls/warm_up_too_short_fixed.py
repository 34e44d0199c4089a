"""Prepare a scheduler whose warm-up is counted in its own advances: steps times processes.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/warm_up_too_short_fixed.py
"""

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

WARM_UP = 4  # steps


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(torch.linspace(0, 1, 16)[:, None], batch_size=2, shuffle=True)
    warm_up = WARM_UP * accelerator.num_processes
    end = 3 * len(loader)  # the batches of all processes in 3 epochs
    scheduler = LambdaLR(optimizer, lambda at: min(at / warm_up, (end - at) / (end - warm_up)))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    rates = []
    for _ in range(3):
        for batch in loader:
            rates.append(scheduler.get_last_lr()[0])
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    steps = rates.index(max(rates))
    accelerator.print(f"{accelerator.num_processes} processes: the warm-up takes {steps} steps")
    accelerator.print(f"it should take {WARM_UP} steps")
    accelerator.end_training()


if __name__ == "__main__":
    main()
