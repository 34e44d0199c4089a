"""Pad predictions to the length of the longest in all processes, then gather them.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/gather_shapes_fixed.py
"""

import os

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader


def main():
    os.environ["ACCELERATE_DEBUG_MODE"] = "true"  # compare shapes before each gather
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    loader = DataLoader(torch.arange(16.0)[:, None], batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    length = 4 + 2 * accelerator.process_index  # 4 tokens in one process, and 6 in the other
    tokens = torch.ones(1, length)
    accelerator.print(f"{accelerator.num_processes} processes gather", flush=True)
    tokens = accelerator.gather(accelerator.pad_across_processes(tokens, dim=1))
    accelerator.print(f"gathered {int(tokens.sum())} tokens")
    accelerator.end_training()


if __name__ == "__main__":
    main()
