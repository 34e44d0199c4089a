"""Divide the batch of 4 samples by the number of processes, so that a step uses 4 in all.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/global_batch_fixed.py
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
    data = torch.linspace(0, 1, 32)[:, None]
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(data, batch_size=4 // accelerator.num_processes, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for batch in loader:
            loss = (model(batch) - 2 * batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        loss = (model(data) - 2 * data).square().mean()
    sizes = f"{2 * len(loader)} steps of {loader.total_batch_size} samples"
    accelerator.print(f"{accelerator.num_processes} processes: {sizes}, a loss of {loss:.2f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
