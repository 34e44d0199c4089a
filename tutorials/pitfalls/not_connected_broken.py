"""Train in two processes that never call `init_process_group`: each trains alone, on all samples.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/not_connected_broken.py
"""

import os

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch import nn
from torch.utils.data import DataLoader


def main():
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    data = torch.arange(32.0)[:, None]
    loader = DataLoader(data, batch_size=4, shuffle=True)
    samples_seen = 0
    for batch in loader:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        samples_seen += len(batch)
    if os.environ["RANK"] == "0":
        processes = os.environ["WORLD_SIZE"]
        print(f"rank 0 of {processes} trains on {samples_seen} of {len(data)} samples")


if __name__ == "__main__":
    main()
