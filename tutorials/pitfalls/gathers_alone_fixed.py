"""Gather the losses on all processes, and print them on the main process.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/gathers_alone_fixed.py
"""

from datetime import timedelta

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from accelerate import Accelerator, InitProcessGroupKwargs
from torch import nn
from torch.utils.data import DataLoader


def main():
    limit = InitProcessGroupKwargs(timeout=timedelta(seconds=5))  # so that it doesn't take long
    accelerator = Accelerator(cpu=True, kwargs_handlers=[limit])
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    loader = DataLoader(torch.arange(16.0)[:, None], batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(1, 4):
        for batch in loader:
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"{accelerator.num_processes} processes end epoch {epoch}", flush=True)
        losses = accelerator.gather(loss.detach())
        if accelerator.is_main_process:
            print(f"gathered {len(losses)} losses", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
