"""Print the loss of each epoch on every rank, which knows only that of its own samples.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/prints_everywhere_broken.py
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
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(torch.arange(16.0)[:, None] / 16, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        total = 0
        for batch in loader:
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        mean = total / len(loader)
        print(f"epoch {epoch}, {accelerator.num_processes} processes: loss {mean:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
