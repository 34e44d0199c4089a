"""Train with a plain `Accelerator()`, which doesn't connect the processes if there is no GPU.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/clones_broken.py
"""

import os

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader


def main():
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    data = torch.arange(32.0)[:, None]
    loader = DataLoader(data, batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    samples_seen = 0
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        samples_seen += len(batch)
    if os.environ["RANK"] == "0":  # is_main_process may be true in both processes
        connected = f"{accelerator.num_processes} of {os.environ['WORLD_SIZE']} processes"
        print(f"connected: {connected}; rank 0 trains on {samples_seen} of {len(data)} samples")
    accelerator.end_training()


if __name__ == "__main__":
    main()
