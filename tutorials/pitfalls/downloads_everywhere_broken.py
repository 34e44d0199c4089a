"""Download the data on every rank at the same time, into the same file.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/downloads_everywhere_broken.py
"""

import tempfile
import time
from pathlib import Path

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
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
    with tempfile.TemporaryDirectory() as folder:
        [folder] = broadcast_object_list([folder])  # that of the main process
        data, is_new = load(Path(folder, "data.pt"))
        downloads = accelerator.reduce(torch.tensor(int(is_new)))  # waits until all have loaded
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2))
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"downloads by {accelerator.num_processes} processes: {downloads}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
