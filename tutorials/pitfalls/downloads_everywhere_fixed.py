"""Download the data on the main process of each machine, while the other processes wait.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/downloads_everywhere_fixed.py
"""

import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader


def load(path):
    """Return the data, and whether this process has downloaded it."""
    if path.exists():
        return torch.load(path), False
    data = torch.rand(16, 1)
    time.sleep(1)  # the time that a download takes
    torch.save(data, path)
    return data, True


def main():
    accelerator = Accelerator(cpu=True)
    path = Path("data.pt")
    with accelerator.local_main_process_first():
        data, is_new = load(path)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2))
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    downloads = accelerator.reduce(torch.tensor(int(is_new)))
    accelerator.print(f"downloads by {accelerator.num_processes} processes: {downloads}")
    if accelerator.is_main_process:
        path.unlink()  # so that the next run downloads it again
    accelerator.end_training()


if __name__ == "__main__":
    main()
